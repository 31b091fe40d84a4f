"""Batches: what is sent to one process within a turn of the event loop travels as one message of up to 64.

Nobody waits for a batch to fill: a peer's writer wakes when the loop comes round, and takes what there is. The order
between two processes stays, also of messages that travel alone. Up to 64 messages wait for each writer, beyond which
the sender waits with them: so what is waiting is that much more than the transport beneath allows.
"""

from __future__ import annotations

import asyncio
from collections import deque

from bus.codec import begins_with, encode_batch, head_of
from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    CallFailed,
    CodeFinished,
    CodeRequested,
    SessionEnded,
    SessionRestored,
)
from bus.transport import Bus, Transport

BATCH_MESSAGES = 64
_BATCH_BYTES = 1 << 20  # a batch takes no further message beyond it
_FLUSH_S = 0.5  # how long closing waits for a peer that does not take what is waiting for it
_KINDS = (  # those between rollouts and executors
    *(CodeRequested, SessionRestored, AnswerSubmitted, SessionEnded),
    *(CodeFinished, CallFailed, AnswerGraded),
)
_BATCHED = tuple(head_of(kind) for kind in _KINDS)


def batched(bus: Bus) -> Bus:
    """The same bus, sending in batches. Every bus takes batches apart, so that its peers need not send them."""
    return Bus(bus.process, bus.inbox, BatchingTransport(bus.transport))


class BatchingTransport:
    """Implements bus.transport.Transport on top of another one."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._ways: dict[str, _Way] = {}

    async def send_frame(self, process: str, frame: bytes) -> None:
        way = self._ways.get(process)
        if way is None:
            way = self._ways[process] = _Way(process, self._transport)
        await way.put(frame)

    async def close(self) -> None:
        """Sends what is waiting, as far as the peers take it within half a second."""
        writers = [way.close() for way in self._ways.values()]
        if writers:
            _, late = await asyncio.wait(writers, timeout=_FLUSH_S)
            for writer in late:
                writer.cancel()
            await asyncio.gather(*writers, return_exceptions=True)
        await self._transport.close()


class _Way:
    """What waits for one peer, in its order, and the task that sends it: no sender that is cancelled takes it along."""

    def __init__(self, process: str, transport: Transport) -> None:
        self._process = process
        self._transport = transport
        self._waiting: deque[bytes] = deque()
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False
        self._writer = asyncio.create_task(self._write(), name=f"writer to {process}")

    async def put(self, frame: bytes) -> None:
        while len(self._waiting) >= BATCH_MESSAGES and not self._writer.done():
            self._room.clear()
            await self._room.wait()
        if self._writer.done():
            if not self._writer.cancelled():
                self._writer.result()  # raises what the transport raised
            raise ConnectionError(f"the way to {self._process} is closed")
        self._waiting.append(frame)
        self._filled.set()

    def close(self) -> asyncio.Task[None]:
        """The writer, which ends when nothing is waiting."""
        self._closed = True
        self._filled.set()
        return self._writer

    async def _write(self) -> None:
        try:
            while self._waiting or not self._closed:
                if not self._waiting:
                    self._filled.clear()
                    await self._filled.wait()
                    continue
                frame = self._take()
                self._room.set()
                await self._transport.send_frame(self._process, frame)
        finally:
            self._room.set()

    def _take(self) -> bytes:
        """The next frame: one that travels alone, or a batch of all that come before the next such one."""
        first = self._waiting.popleft()
        if not begins_with(first, _BATCHED):
            return first
        frames, num_bytes = [first], len(first)
        while self._waiting and num_bytes < _BATCH_BYTES and begins_with(self._waiting[0], _BATCHED):
            frames.append(self._waiting.popleft())
            num_bytes += len(frames[-1])
        return encode_batch(frames) if len(frames) > 1 else first
