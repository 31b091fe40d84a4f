"""Checks the interpreter's SGLang version and the port before a server starts."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Mapping

from asterism.engine.sglang.http_api import SUPPORTED_VERSIONS
from asterism.engine.sglang.server.compatibility import ServerUnusable

_VERSION_PROGRAM = "import importlib.metadata as metadata; print(metadata.version('sglang'))"
_PORT_TIMEOUT_S = 30.0  # time for a killed earlier server to free the port
_PORT_POLL_S = 0.2


async def check_interpreter(python: str, variables: Mapping[str, str]) -> str:
    """Return the interpreter's SGLang version. Raises ServerUnusable without SGLang or for another version."""
    code, output, errors = await run_python(python, _VERSION_PROGRAM, variables)
    if code != 0:
        raise ServerUnusable(
            f"sglang.python = {python}: has no SGLang {' or '.join(SUPPORTED_VERSIONS)} "
            f"({extract_last_line(errors)}); see docs/sglang.md"
        )
    version = output.strip()
    if version not in SUPPORTED_VERSIONS:
        raise ServerUnusable(
            f"sglang.python = {python}: has SGLang {version}; supported: {', '.join(SUPPORTED_VERSIONS)}"
        )
    return version


async def run_python(python: str, program: str, variables: Mapping[str, str]) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr. Raises ServerUnusable. Cancellation kills all of the program's processes."""
    command, pipe = (python, "-c", program), asyncio.subprocess.PIPE
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(*command, env=variables, stdout=pipe, stderr=pipe, start_new_session=True)
    )
    try:
        process = await asyncio.shield(starting)
        output, errors = await process.communicate()
    except OSError as error:
        raise ServerUnusable(f"sglang.python = {python}: cannot be run: {error.strerror}") from None
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):  # the program could not be started, or has ended
            process = await starting
            os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
        raise
    return await process.wait(), output.decode(errors="replace"), errors.decode(errors="replace")


def extract_last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


async def wait_for_free_port(host: str, port: int, timeout_s: float = _PORT_TIMEOUT_S) -> None:
    """Wait until the port is free. Raises ServerUnusable after `timeout_s`, and for an unusable host."""
    deadline = time.monotonic() + timeout_s
    while not _is_free(host, port):
        if time.monotonic() > deadline:
            raise ServerUnusable(f"sglang.port: port {port} is in use; choose another, or set sglang.external_urls")
        await asyncio.sleep(_PORT_POLL_S)


def _is_free(host: str, port: int) -> bool:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise ServerUnusable(f"host {host}, port {port}: {error.strerror}") from None
    return True
