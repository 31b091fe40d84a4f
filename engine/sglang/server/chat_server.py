"""Runs an SGLang server in the foreground until ^C, for programs and people who chat with a model by OpenAI's API.

A run starts its servers with managed_server.SGLangServer: they generate from token ids and have no chat template.
"""

import asyncio
import os
import re
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from asterism.bus.process import parent_death
from asterism.bus.process.waiting import cancel_tasks, make_interrupt_event, wait_for_first
from asterism.configs.loading.secret_references import resolve_references
from asterism.configs.schema.sglang import SGLangConfig
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.server.compatibility import ServerUnusable
from asterism.engine.sglang.server.gpu_check import query_gpu_inventory
from asterism.engine.sglang.server.interpreter_check import check_interpreter, wait_for_free_port
from asterism.engine.sglang.server.server_arguments import CPU_ARGUMENTS, HOST
from asterism.engine.sglang.server.server_process_group import ProcessGroup

_TERM_GRACE_S = 10.0  # time for requests in flight after SIGTERM
_READY_POLL_S = 0.5
_PIPE_GRACE_S = 1.0  # processes that outlive the server can keep its pipe open
_KEPT_LINES = 100
_ANY_HOST = ("0.0.0.0", "::")
_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*|.*\berror: .*")


class ChatServer(NamedTuple):
    model: Path  # transformers folder of the model
    name: str  # the model's name in requests
    host: str
    port: int
    device: str  # "cpu", "cuda" or "auto"
    tool_call_parser: str  # name of a parser; empty: no parser
    reasoning_parser: str
    sglang: SGLangConfig
    arguments: Sequence[str]  # the last arguments of the command line
    scratch: Path

    @property
    def url(self) -> str:
        """The server's URL for a client on this machine."""
        host = HOST if self.host in _ANY_HOST else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def build_chat_argv(server: ChatServer, device: str) -> list[str]:
    """Return the arguments of the interpreter."""
    template = server.model / "chat_template.jinja"
    return [
        *("-m", "sglang.launch_server", "--model-path", str(server.model), "--served-model-name", server.name),
        *("--host", server.host, "--port", str(server.port), "--device", device, "--log-level", "warning"),
        *(("--chat-template", str(template)) if template.exists() else ()),
        *(("--tool-call-parser", server.tool_call_parser) if server.tool_call_parser else ()),
        *(("--reasoning-parser", server.reasoning_parser) if server.reasoning_parser else ()),
        *("--tp-size", str(server.sglang.tensor_parallel), "--dp-size", str(server.sglang.data_parallel)),
        *(CPU_ARGUMENTS if device == "cpu" else ("--mem-fraction-static", str(server.sglang.memory_share))),
        *server.sglang.arguments,
        *server.arguments,
    ]


async def serve_chats(server: ChatServer, on_ready: Callable[[], Awaitable[None]]) -> int:
    """Serve until the server exits; return its exit code, or 0 after ^C, SIGTERM or SIGHUP. Print its output.

    Raises ServerUnusable for an interpreter without SGLang, an unusable host, a port in use, and a server that exits
    before it is ready.
    """
    interrupted = make_interrupt_event()
    own = resolve_references(server.sglang.environment, "sglang.environment").table
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", **own}
    python = server.sglang.python or sys.executable
    await check_interpreter(python, variables)
    await wait_for_free_port(server.host, server.port, timeout_s=0)
    device = server.device if server.device != "auto" else await _find_device(python, variables)
    if device == "cpu":
        variables = {"TORCHDYNAMO_DISABLE": "1", **variables}  # compiling the few compiled functions takes a minute
    group = await _spawn(server, device, python, variables)
    announcing = asyncio.create_task(_announce(server, on_ready))
    errors = deque[str](maxlen=_KEPT_LINES)
    copying = asyncio.create_task(_copy_errors(group, errors, interrupted))
    try:
        code = await wait_for_first(group.leader.wait(), _wait_for_interrupt(interrupted))
        if code and not announcing.done():
            await asyncio.wait((copying,), timeout=_PIPE_GRACE_S)
            raise ServerUnusable(_describe_failed_start(code, errors, device))
        return code
    finally:
        await cancel_tasks(announcing)
        await group.terminate(_TERM_GRACE_S)
        await cancel_tasks(copying)


async def _copy_errors(group: ProcessGroup, errors: deque[str], interrupted: asyncio.Event) -> None:
    """Print the server's stderr until an interrupt, which makes SGLang print tracebacks; keep the last lines."""
    assert group.leader.stderr is not None
    while chunk := await group.leader.stderr.read(1 << 16):
        if not interrupted.is_set():
            sys.stderr.buffer.write(chunk)
            sys.stderr.flush()
        first, *others = chunk.decode(errors="replace").split("\n")
        errors.append((errors.pop() if errors else "") + first)
        errors.extend(others)


def _describe_failed_start(code: int, errors: Sequence[str], device: str) -> str:
    """Describe the failure by the last error that the server printed."""
    lines = [line.strip() for line in errors if line.strip()]
    found = next(filter(_ERROR.fullmatch, reversed(lines)), lines[-1] if lines else "no output on stderr")
    remedy = "; `make sglang-environment` creates an environment for a machine without a GPU" if device == "cpu" else ""
    return f"the SGLang server ended with exit code {code} before it was ready: {found}{remedy}"


async def _find_device(python: str, variables: Mapping[str, str]) -> str:
    """Return "cuda" if the interpreter's torch finds a GPU, or "cpu"."""
    inventory = await query_gpu_inventory(python, variables)
    return "cuda" if inventory.gpus else "cpu"


async def _spawn(server: ChatServer, device: str, python: str, variables: Mapping[str, str]) -> ProcessGroup:
    """Start the server in a process group of its own: ^C of the terminal reaches only this process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", parent_death.__file__, python, *build_chat_argv(server, device)),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**variables, parent_death.PARENT_PID_VARIABLE: str(os.getpid())},
        start_new_session=True,
    )
    return ProcessGroup(process, server.scratch)


async def _announce(server: ChatServer, on_ready: Callable[[], Awaitable[None]]) -> None:
    async with SGLangClient(server.url, max_in_flight=1, request_timeout_s=server.sglang.request_timeout_s) as client:
        while not await client.is_ready():  # noqa: ASYNC110
            await asyncio.sleep(_READY_POLL_S)
    await on_ready()


async def _wait_for_interrupt(interrupted: asyncio.Event) -> int:
    await interrupted.wait()
    return 0
