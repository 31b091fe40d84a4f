"""Starts vLLM and SGLang servers without a GPU, on the loopback interface, and sends them whole requests."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from numpy.typing import NDArray

from asterism.bus.process import parent_death
from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.sglang import SGLangConfig
from asterism.engine.sglang.server.server_arguments import HOST, build_argv, build_environment
from asterism.engine.sglang.server.server_process_group import ProcessGroup, read_log_tail
from benchmarks.real.real_workload import RealWorkload

_ROOT = Path(__file__).parents[2]
_START_LIMIT_S, _POLL_S, _TERM_GRACE_S = 900.0, 0.5, 5.0
_PAGE_TOKENS = 16


class PeerFailed(Exception):
    """A server could not be started. `str(error)` has the end of its log, or the remedy."""


class PeerKind(NamedTuple):
    """A kind of server: its environment, its command, and its request for new tokens. All servers have GET /health."""

    python: Path
    module: str  # a module of the server's environment
    make_target: str
    build_command: Callable[
        [RealWorkload, int, Path], tuple[list[str], Mapping[str, str]]
    ]  # takes the port and a scratch folder
    path: str  # path of a request for a completion
    build_body: Callable[[RealWorkload, list[int]], dict[str, Any]]
    usage_key: str  # key of the answer's object with completion_tokens


def _build_vllm_command(work: RealWorkload, port: int, _: Path) -> tuple[list[str], Mapping[str, str]]:
    """Build arguments and variables. `vllm serve` needs a package with the name `vllm`; the module does not."""
    batch = max(work.batches)
    arguments = {
        **{"--model": work.model, "--host": HOST, "--port": port, "--dtype": work.dtype},
        **{"--max-model-len": work.sequence_tokens + _PAGE_TOKENS, "--max-num-seqs": batch},
    }
    cache_bytes = batch * 2 * work.sequence_tokens * work.config.count_cache_values() * work.torch_dtype.itemsize
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(1 + cache_bytes // (1 << 30)),  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(work.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    flags = [str(part) for pair in arguments.items() for part in pair]
    return ["-m", "vllm.entrypoints.openai.api_server", *flags, "--enforce-eager"], environment


def _build_sglang_command(work: RealWorkload, port: int, scratch: Path) -> tuple[list[str], Mapping[str, str]]:
    """Build arguments and variables as a run does (docs/sglang.md)."""
    batch = max(work.batches)
    engine = EngineConfig(
        kind="sglang",
        kv_tokens=batch * (work.sequence_tokens + 2 * _PAGE_TOKENS),
        page_tokens=_PAGE_TOKENS,
        prefill_tokens=2048,
        max_running=batch,
        threads=work.threads,
        dtype=work.dtype,  # pyright: ignore[reportArgumentType]
    )
    sglang = SGLangConfig(port=port)
    arguments = build_argv(
        engine, sglang, model=work.model, sequence_tokens=work.sequence_tokens + _PAGE_TOKENS, index=0, version=0
    )
    return arguments, build_environment(engine, sglang, scratch)


def _build_vllm_body(work: RealWorkload, prompt: list[int]) -> dict[str, Any]:
    return {"model": str(work.model), "prompt": prompt, "max_tokens": work.new_tokens, "ignore_eos": True}


def _build_sglang_body(work: RealWorkload, prompt: list[int]) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {"max_new_tokens": work.new_tokens, "ignore_eos": True}}


PEERS = {
    "vllm": PeerKind(
        _ROOT / ".venv-vllm/bin/python",
        "vllm",
        "vllm-environment",
        _build_vllm_command,
        "/v1/completions",
        _build_vllm_body,
        "usage",
    ),
    "sglang": PeerKind(
        _ROOT / ".venv-sglang/bin/python",
        "sglang",
        "sglang-environment",
        _build_sglang_command,
        "/generate",
        _build_sglang_body,
        "meta_info",
    ),
}


def check_peer(name: str) -> None:
    """Raise PeerFailed, with the command that makes the environment, if the server's environment lacks its module."""
    kind = PEERS[name]
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({kind.module!r}) is None)"
    if not kind.python.exists() or subprocess.run([str(kind.python), "-c", find], check=False).returncode:
        raise PeerFailed(
            f"{kind.python} has no {name}: run `make {kind.make_target}`, or leave it out: --without {name}"
        )


class PeerClient(NamedTuple):
    """Sends requests to a running server, all of a batch at once."""

    kind: PeerKind
    work: RealWorkload
    session: aiohttp.ClientSession

    async def ask(self, prompts_BT: NDArray[np.int32]) -> None:
        tokens = await asyncio.gather(*(self._ask_one(prompt.tolist()) for prompt in prompts_BT))
        assert set(tokens) == {self.work.new_tokens}, "a server ended a response early"

    async def _ask_one(self, prompt: list[int]) -> int:
        body = self.kind.build_body(self.work, prompt)
        async with self.session.post(self.kind.path, json=body) as response:
            return (await response.json())[self.kind.usage_key]["completion_tokens"]


@asynccontextmanager
async def running_peer(name: str, work: RealWorkload, scratch: Path) -> AsyncGenerator[PeerClient, None]:
    """Start a server, wait until it is ready, and kill all of its processes at the end. Raises PeerFailed."""
    kind, port, log = PEERS[name], _find_free_port(), scratch / f"{name}.log"
    arguments, variables = kind.build_command(work, port, scratch)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", parent_death.__file__, str(kind.python), *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **variables, parent_death.PARENT_PID_VARIABLE: str(os.getpid())},
            cwd=scratch,
            start_new_session=True,
        )
    group = ProcessGroup(process, scratch)
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0, force_close=True)
    try:
        async with aiohttp.ClientSession(
            f"http://{HOST}:{port}", timeout=timeout, connector=connector, raise_for_status=True
        ) as session:
            await _wait_until_ready(name, process, session, log)
            yield PeerClient(kind, work, session)
    finally:
        await group.terminate(_TERM_GRACE_S)


async def _wait_until_ready(
    name: str, process: asyncio.subprocess.Process, session: aiohttp.ClientSession, log: Path
) -> None:
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            while process.returncode is None:
                try:
                    async with session.get("/health"):
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise PeerFailed(f"the {name} server was not ready after {_START_LIMIT_S:g} s:\n{read_log_tail(log)}") from None
    raise PeerFailed(f"the {name} server ended with exit code {process.returncode}:\n{read_log_tail(log)}")


def _find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]
