"""A proxy between two machines. It has a byte limit, and its connections break."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LOOPBACK = "127.0.0.1"
_READ_BYTES = 4096


class Link:
    """A proxy that forwards connections to a port. After `allowed` bytes of answers it stalls, and it cuts each connection
    after `cut_after` bytes of answers."""

    def __init__(self, target: int, allowed: int | None, cut_after: int | None) -> None:
        self.port = 0
        self.connections = 0
        self.held = asyncio.Event()
        self._target = target
        self._allowed, self._cut_after = allowed, cut_after
        self._released = asyncio.Event()
        self._carrying: set[asyncio.Task[None]] = set()

    def release(self) -> None:
        """Remove the byte limit."""
        self._allowed = None
        self._released.set()

    def cut(self) -> None:
        """Cut all open connections."""
        for task in self._carrying:
            task.cancel()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self._target)
        except ConnectionRefusedError:
            writer.close()
            return
        tasks = {
            asyncio.create_task(self._carry_there(reader, far_writer)),
            asyncio.create_task(self._carry_back(far_reader, writer)),
        }
        self._carrying |= tasks
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._carrying -= tasks
        for end in (writer, far_writer):
            end.transport.abort()

    async def _carry_there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(_READ_BYTES):
            writer.write(content)
            await writer.drain()

    async def _carry_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        carried = 0
        while content := await reader.read(_READ_BYTES):
            if self._allowed is not None:
                self._allowed -= len(content)
                if self._allowed < 0:
                    self.held.set()
                    await self._released.wait()
            carried += len(content)
            if self._cut_after is not None and carried > self._cut_after:
                return
            writer.write(content)
            await writer.drain()


@asynccontextmanager
async def link_to(port: int, allowed: int | None = None, cut_after: int | None = None) -> AsyncIterator[Link]:
    link = Link(port, allowed, cut_after)
    listening = await asyncio.start_server(link.connect, LOOPBACK, 0)
    link.port = listening.sockets[0].getsockname()[1]
    try:
        yield link
    finally:
        listening.close()
        link.cut()
