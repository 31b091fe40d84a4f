"""The contract of a transport, and the typed bus on top of it.

An address is a process, such as `rollout-0`, or `process/actor` where a process holds several actors.
Frames between two processes arrive once, and within a lane (bus.lanes) in the order in which they were sent.

A process may die and come back. Each of its lives has a session; a higher one replaces a lower one. What its peers have
not acknowledged is held by those who sent it, and sent to the next life. A process that remembers what it received and
sent goes on in the same session: it restores the numbers of its links, and its peers see a pause alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from bus.codec import decode, encode
from bus.lanes import BULK, CONTROL, LANES, Lane, lane_of, lane_of_frame
from bus.messages import AnyMessage, Envelope

_IN_A_ROW = 64  # frames of the control lane, after which a bulk frame that waits is read

Sent = Mapping[tuple[str, Lane], tuple[int, Sequence[bytes]]]  # by peer: the next number, and the frames before it
Taken = Mapping[tuple[str, Lane], tuple[int, int]]  # by peer: its session, and the number that comes next


def process_of(address: str) -> str:
    return address.partition("/")[0]


class Delivery(msgspec.Struct, frozen=True, gc=False):
    frame: bytes
    sender: str  # process
    lane: Lane
    session: int  # of the sender
    number: int  # of the frame, in its lane and session


class Inbox:
    """Frames that have arrived and wait to be read, those of the control lane first.

    Beyond `bound` frames a lane is full: the transport stops reading it, so that the senders wait, until half of them
    are read; the other lane goes on. Nothing is dropped. What arrived together may go over the bound together.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.when_drained: Callable[[Lane], None] = lambda lane: None
        self._control: deque[Delivery] = deque()
        self._bulk: deque[Delivery] = deque()
        self._arrival = asyncio.Event()
        self._in_a_row = 0

    def __len__(self) -> int:
        return len(self._control) + len(self._bulk)

    def full(self, lane: Lane) -> bool:
        return len(self._control if lane == CONTROL else self._bulk) >= self.bound

    def put(self, lane: Lane, deliveries: Sequence[Delivery]) -> None:
        (self._control if lane == CONTROL else self._bulk).extend(deliveries)
        self._arrival.set()

    def take(self) -> Delivery | None:
        """The next one, if there is any."""
        if self._control and (self._in_a_row < _IN_A_ROW or not self._bulk):
            self._in_a_row += 1
            return self._taken(CONTROL, self._control)
        self._in_a_row = 0
        return self._taken(BULK, self._bulk) if self._bulk else None

    def _taken(self, lane: Lane, deliveries: deque[Delivery]) -> Delivery:
        delivery = deliveries.popleft()
        if len(deliveries) == self.bound // 2:
            self.when_drained(lane)
        return delivery

    async def get(self) -> Delivery:
        while (delivery := self.take()) is None:
            self._arrival.clear()
            await self._arrival.wait()
        return delivery


class Transport(Protocol):
    """Moves frames between processes and puts those that arrive into the inbox that it was made with."""

    @property
    def session(self) -> int:
        """Of this process's life."""
        ...

    async def send_frame(self, process: str, lane: Lane, frame: bytes) -> None:
        """Waits while as much as may be is not acknowledged by that process. Cancelled while it waits, nothing is sent."""
        ...

    def acknowledge(self, delivery: Delivery) -> None: ...

    def restore(self, sent: Sent, taken: Taken) -> None: ...

    def forget(self, process: str) -> None: ...

    @property
    def unacknowledged(self) -> Mapping[str, int]: ...

    @property
    def dropped(self) -> int: ...

    async def close(self) -> None: ...


class Bus:
    """What an actor holds: typed messages over a transport. Messages to the own process do not leave it."""

    def __init__(self, process: str, inbox: Inbox, transport: Transport) -> None:
        self.process = process
        self._inbox = inbox
        self._transport = transport
        self._own_numbers = dict.fromkeys(LANES, 0)

    # ---------------------------------------------------------------- sending

    async def send(self, to: str, message: AnyMessage, sender: str | None = None) -> None:
        frame = encode(Envelope(sender or self.process, to, message))
        await self._send(process_of(to), lane_of(type(message).__name__), frame)

    async def send_frame(self, to: str, frame: bytes) -> None:
        """Raises ValueError for a frame that is longer than frames may be."""
        await self._send(process_of(to), lane_of_frame(frame), frame)

    async def _send(self, process: str, lane: Lane, frame: bytes) -> None:
        if process == self.process:
            self._send_to_itself(lane, [frame])
        else:
            await self._transport.send_frame(process, lane, frame)

    def _send_to_itself(self, lane: Lane, frames: Sequence[bytes]) -> None:
        """They count in no window: who waits for room in his own queue waits for ever."""
        first, session = self._own_numbers[lane], self._transport.session
        self._own_numbers[lane] += len(frames)
        numbered = enumerate(frames, first)
        self._inbox.put(lane, [Delivery(frame, self.process, lane, session, number) for number, frame in numbered])

    # ---------------------------------------------------------------- receiving

    async def receive(self) -> Envelope:
        """Raises bus.codec.MalformedFrame; the frame is gone then, and the next one can be received."""
        return decode(await self.receive_frame())

    async def receive_frame(self) -> bytes:
        """Acknowledges as it takes."""
        delivery = self._inbox.take() or await self._inbox.get()
        self._transport.acknowledge(delivery)
        return delivery.frame

    async def receive_delivery(self) -> Delivery:
        """To be acknowledged by who receives it: until then the sender holds it for the next life of this process."""
        return self._inbox.take() or await self._inbox.get()

    def acknowledge(self, delivery: Delivery) -> None:
        """It is done with, and so is all that came before it in its lane of its link."""
        self._transport.acknowledge(delivery)

    # ---------------------------------------------------------------- other lives

    def restore(self, sent: Sent, taken: Taken) -> None:
        """Go on where an earlier life of this session was. To be called before anything is sent or has arrived.

        `sent` are the frames that may not have been acknowledged, with consecutive numbers up to the next one; those to
        this process itself are received again.
        """
        for lane in LANES:
            next_number, frames = sent.get((self.process, lane), (0, ()))
            self._own_numbers[lane] = next_number - len(frames)
            self._send_to_itself(lane, frames)
        self._transport.restore(
            {key: value for key, value in sent.items() if key[0] != self.process},
            {key: value for key, value in taken.items() if key[0] != self.process},
        )

    def forget(self, process: str) -> None:
        """Drop what that process has not acknowledged: it is gone for good. Should it come back, numbers go on."""
        self._transport.forget(process)

    # ---------------------------------------------------------------- gauges

    @property
    def waiting(self) -> int:
        """Frames that have arrived and are not yet read."""
        return len(self._inbox)

    @property
    def unacknowledged(self) -> Mapping[str, int]:
        """By peer, the frames that were sent to it and are held. Who has nothing is not in it."""
        return self._transport.unacknowledged

    @property
    def dropped(self) -> int:
        """Frames that came twice or were for who is gone, and parcels that were malformed, of a session that is over, or
        from who is gone."""
        return self._transport.dropped

    async def close(self) -> None:
        """Waits up to half a second for what the peers have not received."""
        await self._transport.close()
