"""A fork server or grader as the executor sees it: a process, a socket, and answers that are waited for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from sandbox.contract import SandboxFailure
from sandbox.inside.frames import BrokenStream, Frame, FrameReader, encode
from sandbox.inside.settings import Settings

_ROOT = Path(__file__).resolve().parent.parent
# `random` would seed itself anew in each forked process, which costs as much as a small call; each call is seeded anyway.
_BOOT = """
import os, sys
hook, os.register_at_fork = os.register_at_fork, lambda **_: None
import random
os.register_at_fork = hook
sys.path.insert(0, {root!r})
from {module} import main
main()
"""
_STOP_S = 5.0  # a server that has not ended so long after its socket closed is killed
_ENVIRONMENT = {  # all that executed code can find there
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the order of a set of strings must not change between two processes
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class ServerProcess(asyncio.Protocol):
    """Consumes the server's frames and hands them to `on_frame`; `on_end` is called once, when it has gone."""

    def __init__(self, module: str, on_frame: Callable[[Frame], None], on_end: Callable[[], None]) -> None:
        self._module = module
        self._on_frame = on_frame
        self._on_end = on_end
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._first: asyncio.Future[Frame] | None = None
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Of the process that was started; in namespaces it is the parent of the one that serves."""
        return self._process.pid if self._process else None

    async def start(self, settings: Settings) -> Frame:
        """Its first frame. Raises SandboxFailure if it says that it cannot run, or says nothing."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._first = loop.create_future()
        try:
            # The thread that starts it must live as long as it does: the kernel ends it with this thread.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                _command(self._module, settings, theirs.fileno()),
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
            )
        except OSError as error:
            ours.close()
            raise SandboxFailure(f"cannot start a sandbox process: {error.strerror}") from error
        finally:
            theirs.close()
        await loop.create_connection(lambda: self, sock=ours)
        try:
            return await self._first
        except BaseException:
            await self.stop()
            raise

    def send(self, frame: Frame) -> None:
        if self._transport is not None:
            self._transport.write(encode(frame))

    def kill(self) -> None:
        """At once. `on_end` follows."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    async def stop(self) -> None:
        """Returns when the process has ended."""
        if self._transport is not None:
            self._transport.close()
        if self._process is None:
            return
        try:
            await asyncio.wait_for(_exited(self._process), _STOP_S)
        except TimeoutError:
            self._process.kill()
            await _exited(self._process)

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._reader.feed(data)
        except BrokenStream:
            self.kill()
            return
        for frame in frames:
            if self._first is not None and not self._first.done():
                self._greeted(frame)
            else:
                self._on_frame(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._first is not None and not self._first.done():
            self._first.set_exception(SandboxFailure("a sandbox process ended while it started"))
        else:
            self._on_end()

    def _greeted(self, frame: Frame) -> None:
        assert self._first is not None
        if "refused" in frame:
            self._first.set_exception(SandboxFailure(str(frame["refused"])))
        else:
            self._first.set_result(frame)


def _command(module: str, settings: Settings, fd: int) -> list[str]:
    # The base interpreter: a virtual environment's is not visible in the sandbox's root.
    python = os.path.realpath(sys.executable)
    boot = _BOOT.format(root=str(_ROOT), module=module)
    return [python, "-s", "-P", "-S", "-B", "-c", boot, settings.to_json(), str(fd)]


async def _exited(process: subprocess.Popen[bytes]) -> None:
    """Waits without polling, and reaps."""
    if process.poll() is not None:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    with contextlib.suppress(ChildProcessError):
        process.wait()
