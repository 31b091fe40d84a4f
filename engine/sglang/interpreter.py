"""What can be known before a server is started: whether its interpreter has SGLang, of which version, and its port."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Mapping

from engine.sglang.fit import ServerUnusable
from engine.sglang.protocol import SUPPORTED

_ASK = "import importlib.metadata as metadata; print(metadata.version('sglang'))"
_PORT_WITHIN_S = 30.0  # a former life's server that was killed gives it back
_ASK_EVERY_S = 0.2


async def check_interpreter(python: str, variables: Mapping[str, str]) -> str:
    """The version of its SGLang. Raises ServerUnusable where `python` cannot be run, has no SGLang, or one of a version
    that is not known here."""
    code, output, errors = await answer_of(python, _ASK, variables)
    if code != 0:
        raise ServerUnusable(
            f"sglang.python = {python}: has no SGLang {' or '.join(SUPPORTED)} ({last_line(errors)}): docs/sglang.md"
        )
    version = output.strip()
    if version not in SUPPORTED:
        raise ServerUnusable(f"sglang.python = {python}: has SGLang {version}; known here: {', '.join(SUPPORTED)}")
    return version


async def answer_of(python: str, program: str, variables: Mapping[str, str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the program. Raises ServerUnusable where `python` cannot be run."""
    try:
        process = await asyncio.create_subprocess_exec(
            python, "-c", program, env=variables, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise ServerUnusable(f"sglang.python = {python}: cannot be run: {error.strerror}") from None
    try:
        output, errors = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    return await process.wait(), output.decode(errors="replace"), errors.decode(errors="replace")


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


async def wait_for_port(host: str, port: int, within_s: float = _PORT_WITHIN_S) -> None:
    """Raises ServerUnusable where somebody else listens there for longer than that."""
    last = time.monotonic() + within_s
    while not _is_free(host, port):
        if time.monotonic() > last:
            raise ServerUnusable(
                f"sglang.port: somebody listens at port {port} already; take another, or sglang.attach"
            )
        await asyncio.sleep(_ASK_EVERY_S)


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True
