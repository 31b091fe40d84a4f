"""Connects the executor to a fork server or grader: launches the process and exchanges frames over its socket."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import cast

import msgspec

from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.hosts.host import Host, LaunchedProcess
from asterism.sandbox.inside.wire.frames import LENGTH, BrokenStream, Frame, FrameReader, encode_frame
from asterism.sandbox.inside.wire.server_settings import ServerSettings

_GREETING_TIMEOUT_S = 120.0  # time for the imports, also when many servers start on few cores
_STOP_TIMEOUT_S = 5.0  # time from closing the socket to killing a server that has not exited


class ServerConnection(asyncio.Protocol):
    """A connection that passes the server's frames to `on_frame` and calls `on_end` once, at its end."""

    def __init__(self, host: Host, module: str, on_frame: Callable[[Frame], None], on_end: Callable[[], None]) -> None:
        self._host = host
        self._module = module
        self._on_frame = on_frame
        self._on_end = on_end
        self._reader = FrameReader(msgspec.json.decode)  # msgspec is five times as fast as json
        self._transport: asyncio.Transport | None = None
        self._process: LaunchedProcess | None = None
        self._greeting: asyncio.Future[Frame] | None = None

    @property
    def pid(self) -> int | None:
        """The pid on this machine. With namespaces, it is the pid of the serving process's parent."""
        return self._process.pid if self._process else None

    async def start(self, settings: ServerSettings) -> Frame:
        """Start the server and return its greeting. Raises SandboxFailure if the server cannot run or sends nothing."""
        loop = asyncio.get_running_loop()
        self._greeting = loop.create_future()
        self._process = await self._host.launch(self._module, settings)
        try:
            await loop.create_connection(lambda: self, sock=self._process.socket)
            async with asyncio.timeout(_GREETING_TIMEOUT_S):
                return await self._greeting
        except BaseException as error:
            self._greeting.cancel()
            await self.stop()
            if isinstance(error, TimeoutError):
                raise SandboxFailure(f"a sandbox process sent no greeting within {_GREETING_TIMEOUT_S:g} s") from None
            raise

    def send(self, frame: Frame) -> None:
        if self._transport is not None:
            self._transport.write(_encode(frame))

    def kill(self) -> None:
        """Kill the process; `on_end` follows."""
        if self._process is not None:
            self._process.kill()

    def abort(self) -> None:
        """Kill the process; `on_end` follows in the next turn of the event loop."""
        self.kill()
        if self._transport is not None:
            self._transport.abort()

    async def stop(self) -> None:
        """Wait for the exit, then kill; return even if the kill has no effect, as in a frozen container."""
        if self._transport is not None:
            self._transport.close()
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            if self._transport is not None:
                self._transport.abort()  # discards unsent data
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from asyncio.Transport

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._reader.feed(data)
        except BrokenStream:
            self.kill()
            return
        for frame in frames:
            if self._greeting is not None and not self._greeting.done():
                self._on_greeting(frame)
            else:
                self._on_frame(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._greeting is not None and not self._greeting.done():
            self._greeting.set_exception(SandboxFailure("a sandbox process exited while it started"))
        else:
            self._on_end()

    def _on_greeting(self, frame: Frame) -> None:
        assert self._greeting is not None
        if "refused" in frame:
            self._greeting.set_exception(SandboxFailure(str(frame["refused"])))
        else:
            self._greeting.set_result(frame)


def _encode(frame: Frame) -> bytes:
    try:
        body = msgspec.json.encode(frame)
    except UnicodeEncodeError:  # a lone surrogate, which only the standard library's JSON encodes
        return encode_frame(frame)
    return LENGTH.pack(len(body)) + body
