"""The contract of a transport, and the typed bus on top of it.

An address is a process, such as `rollout-0`, or `process/actor` where a process holds several actors.
Frames between two processes arrive once and in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from bus.codec import decode, encode, split
from bus.messages import AnyMessage, Envelope


def process_of(address: str) -> str:
    return address.partition("/")[0]


class Inbox:
    """Frames that have arrived and wait to be read.

    Beyond `bound` frames it is full: the transport stops reading, so that the senders wait, until half of them are
    read. Nothing is dropped. A batch counts as what is in it, and may go over the bound by all but one of these.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.when_drained: Callable[[], None] = lambda: None
        self._frames: deque[bytes] = deque()
        self._arrival = asyncio.Event()

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def full(self) -> bool:
        return len(self._frames) >= self.bound

    def put(self, frame: bytes) -> None:
        self._frames.extend(split(frame))
        self._arrival.set()

    async def get(self) -> bytes:
        while not self._frames:
            self._arrival.clear()
            await self._arrival.wait()
        frame = self._frames.popleft()
        if len(self._frames) == self.bound // 2:
            self.when_drained()
        return frame


class Transport(Protocol):
    """Moves frames between processes and puts those that arrive into the inbox that it was made with."""

    async def send_frame(self, process: str, frame: bytes) -> None:
        """Waits while the way to that process is full."""
        ...

    async def close(self) -> None: ...


class Bus:
    """What an actor holds: typed messages over a transport. Messages to the own process do not leave it."""

    def __init__(self, process: str, inbox: Inbox, transport: Transport) -> None:
        self.process = process
        self.inbox = inbox
        self.transport = transport

    async def send(self, to: str, message: AnyMessage, sender: str | None = None) -> None:
        await self.send_frame(to, encode(Envelope(sender or self.process, to, message)))

    async def send_frame(self, to: str, frame: bytes) -> None:
        process = process_of(to)
        if process == self.process:
            self.inbox.put(frame)
        else:
            await self.transport.send_frame(process, frame)

    async def receive(self) -> Envelope:
        """Raises bus.codec.MalformedFrame; the frame is gone then, and the next one can be received."""
        return decode(await self.inbox.get())

    async def receive_frame(self) -> bytes:
        return await self.inbox.get()

    @property
    def waiting(self) -> int:
        """Frames that have arrived and are not yet read."""
        return len(self.inbox)

    async def close(self) -> None:
        await self.transport.close()
