"""A fork server or grader as the executor sees it: a process somewhere, a socket, and frames."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import cast

import msgspec

from sandbox.contract import SandboxFailure
from sandbox.host import Host, Launched
from sandbox.inside.frames import LENGTH, BrokenStream, Frame, FrameReader, encode
from sandbox.inside.settings import Settings

_GREETING_S = 120.0  # for what it imports, also where many start at once on few cores
_STOP_S = 5.0  # a server that has not ended so long after its socket closed is killed


class ServerProcess(asyncio.Protocol):
    """Consumes the server's frames and hands them to `on_frame`; `on_end` is called once, when it has gone."""

    def __init__(self, host: Host, module: str, on_frame: Callable[[Frame], None], on_end: Callable[[], None]) -> None:
        self._host = host
        self._module = module
        self._on_frame = on_frame
        self._on_end = on_end
        self._reader = FrameReader(msgspec.json.decode)  # a fifth of the standard library's time
        self._transport: asyncio.Transport | None = None
        self._launched: Launched | None = None
        self._first: asyncio.Future[Frame] | None = None

    @property
    def pid(self) -> int | None:
        """As this machine numbers it; in namespaces it is the parent of the one that serves."""
        return self._launched.pid if self._launched else None

    async def start(self, settings: Settings) -> Frame:
        """Its first frame. Raises SandboxFailure if it says that it cannot run, or says nothing."""
        loop = asyncio.get_running_loop()
        self._first = loop.create_future()
        self._launched = await self._host.launch(self._module, settings)
        try:
            await loop.create_connection(lambda: self, sock=self._launched.socket)
            async with asyncio.timeout(_GREETING_S):
                return await self._first
        except BaseException as error:
            self._first.cancel()
            await self.stop()
            if isinstance(error, TimeoutError):
                raise SandboxFailure("a sandbox process said nothing when it started") from None
            raise

    def send(self, frame: Frame) -> None:
        if self._transport is not None:
            self._transport.write(_encoded(frame))

    def kill(self) -> None:
        """At once. `on_end` follows."""
        if self._launched is not None:
            self._launched.kill()

    def give_up(self) -> None:
        """As `kill`, and does not wait for what hangs there: `on_end` follows in the next turn of the loop."""
        self.kill()
        if self._transport is not None:
            self._transport.abort()

    async def stop(self) -> None:
        """Returns when the process has ended; also if it does not even when it is killed, as in a frozen container."""
        if self._transport is not None:
            self._transport.close()
        if self._launched is None:
            return
        try:
            await asyncio.wait_for(self._launched.ended(), _STOP_S)
        except TimeoutError:
            self._launched.kill()
            if self._transport is not None:
                self._transport.abort()  # what it never read is not waited for
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._launched.ended(), _STOP_S)

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


def _encoded(frame: Frame) -> bytes:
    try:
        body = msgspec.json.encode(frame)
    except UnicodeEncodeError:  # half a character, which only the standard library's JSON can carry
        return encode(frame)
    return LENGTH.pack(len(body)) + body
