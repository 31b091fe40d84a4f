"""The typed bus of an actor, and the contract of the transport below it.

Addresses are defined in asterism.bus.addresses. Frames between two processes arrive exactly once and,
within a lane (asterism.bus.lanes), in the order in which they were sent.

A process can be killed and restarted. Each incarnation has an epoch; a higher epoch replaces lower
epochs. Senders hold frames that a process has not acknowledged, and send them to its next incarnation. A
process that logs its events and decisions continues in the same epoch: it restores the numbers of its
links, and its peers observe only a pause.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from asterism.bus.addresses import parse_process
from asterism.bus.codec import decode, encode
from asterism.bus.lanes import BULK, CONTROL, LANES, Lane, select_frame_lane, select_lane
from asterism.bus.messages import AnyMessage, Envelope

_MAX_CONTROL_IN_A_ROW = 64  # control frames that are read in a row while a bulk frame waits

SendState = Mapping[
    tuple[str, Lane], tuple[int, Sequence[bytes]]
]  # next number and the held frames before this number, by peer and lane
ReceiveState = Mapping[tuple[str, Lane], tuple[int, int]]  # the peer's epoch and the next number, by peer and lane


class Delivery(msgspec.Struct, frozen=True, gc=False):
    frame: bytes
    sender: str  # name of the sending process
    lane: Lane
    epoch: int  # epoch of the sender
    number: int  # number of the frame in its lane and epoch


class Inbox:
    """Frames that have arrived and are not read yet; control frames are read first.

    A lane with `max_frames` frames is full: the transport stops reading the lane, so that its senders
    wait until half of the frames are read. The other lane is not affected, and no frame is dropped. One packet can
    exceed the bound.
    """

    def __init__(self, max_frames: int) -> None:
        self.max_frames = max_frames
        self.on_drained: Callable[[Lane], None] = lambda lane: None
        self._control: deque[Delivery] = deque()
        self._bulk: deque[Delivery] = deque()
        self._arrival = asyncio.Event()
        self._control_in_a_row = 0

    def __len__(self) -> int:
        return len(self._control) + len(self._bulk)

    def is_full(self, lane: Lane) -> bool:
        return len(self._control if lane == CONTROL else self._bulk) >= self.max_frames

    def put(self, lane: Lane, deliveries: Sequence[Delivery]) -> None:
        (self._control if lane == CONTROL else self._bulk).extend(deliveries)
        self._arrival.set()

    def pop(self) -> Delivery | None:
        """Return the next frame, or None."""
        if self._control and (self._control_in_a_row < _MAX_CONTROL_IN_A_ROW or not self._bulk):
            self._control_in_a_row += 1
            return self._pop_from(CONTROL, self._control)
        self._control_in_a_row = 0
        return self._pop_from(BULK, self._bulk) if self._bulk else None

    def _pop_from(self, lane: Lane, deliveries: deque[Delivery]) -> Delivery:
        delivery = deliveries.popleft()
        if len(deliveries) == self.max_frames // 2:
            self.on_drained(lane)
        return delivery

    async def get(self) -> Delivery:
        while (delivery := self.pop()) is None:
            self._arrival.clear()
            await self._arrival.wait()
        return delivery


class Transport(Protocol):
    """A transport, which moves frames between processes and puts received frames into its inbox."""

    @property
    def epoch(self) -> int: ...

    async def send_frame(self, process: str, lane: Lane, frame: bytes) -> None:
        """Send a frame; wait while the window to the process is full. A cancelled wait sends nothing."""
        ...

    def acknowledge(self, delivery: Delivery) -> None: ...

    def restore(self, sent: SendState, received: ReceiveState) -> None: ...

    def drop_unacknowledged(self, process: str) -> int:
        """Drop the frames that the process has not acknowledged; return their number."""
        ...

    def forget_peer(self, process: str) -> None: ...

    @property
    def unacknowledged(self) -> Mapping[str, int]: ...

    @property
    def dropped(self) -> int: ...

    async def close(self) -> None: ...


class Bus:
    """A bus for typed messages over a transport. Messages of a process to itself bypass the transport."""

    def __init__(self, process: str, inbox: Inbox, transport: Transport) -> None:
        self.process = process
        self._inbox = inbox
        self._transport = transport
        self._loopback_numbers = dict.fromkeys(LANES, 0)

    # ---------------------------------------------------------------- sending

    async def send(self, to: str, message: AnyMessage, sender: str | None = None) -> None:
        frame = encode(Envelope(sender or self.process, to, message))
        await self._send(parse_process(to), select_lane(type(message).__name__), frame)

    async def send_frame(self, to: str, frame: bytes) -> None:
        """Send an encoded envelope. Raises ValueError for a frame that is too long."""
        await self._send(parse_process(to), select_frame_lane(frame), frame)

    async def _send(self, process: str, lane: Lane, frame: bytes) -> None:
        if process == self.process:
            self._send_loopback(lane, [frame])
        else:
            await self._transport.send_frame(process, lane, frame)

    def _send_loopback(self, lane: Lane, frames: Sequence[bytes]) -> None:
        """Put frames into the own inbox without a window, because an actor that waits for its own queue deadlocks."""
        first, epoch = self._loopback_numbers[lane], self._transport.epoch
        self._loopback_numbers[lane] += len(frames)
        numbered = enumerate(frames, first)
        self._inbox.put(lane, [Delivery(frame, self.process, lane, epoch, number) for number, frame in numbered])

    # ---------------------------------------------------------------- receiving

    async def receive(self) -> Envelope:
        """Receive and acknowledge a message. Drops a malformed frame and raises asterism.bus.codec.MalformedFrame."""
        return decode(await self.receive_frame())

    async def receive_frame(self) -> bytes:
        delivery = self._inbox.pop() or await self._inbox.get()
        self._transport.acknowledge(delivery)
        return delivery.frame

    async def receive_delivery(self) -> Delivery:
        """Receive a frame that the caller acknowledges; until then, the sender holds it for the next incarnation."""
        return self._inbox.pop() or await self._inbox.get()

    def acknowledge(self, delivery: Delivery) -> None:
        """Acknowledge this frame and all earlier frames of the same sender and lane."""
        self._transport.acknowledge(delivery)

    # ---------------------------------------------------------------- restarts

    def restore(self, sent: SendState, received: ReceiveState) -> None:
        """Continue an earlier incarnation of the same epoch, before any frame is sent or received.

        `sent`: frames that can be unacknowledged, with consecutive numbers up to the next number.
        Frames to the own process are received again.
        """
        for lane in LANES:
            next_number, frames = sent.get((self.process, lane), (0, ()))
            self._loopback_numbers[lane] = next_number - len(frames)
            self._send_loopback(lane, frames)
        self._transport.restore(
            {key: value for key, value in sent.items() if key[0] != self.process},
            {key: value for key, value in received.items() if key[0] != self.process},
        )

    def drop_unacknowledged(self, process: str) -> None:
        """Drop the frames that an ended process has not acknowledged; numbering continues."""
        self._transport.drop_unacknowledged(process)

    def forget_peer(self, process: str) -> None:
        """Drop the links with a process that has ended; a later process of this name starts new links."""
        self._transport.forget_peer(process)

    # ---------------------------------------------------------------- gauges

    @property
    def waiting(self) -> int:
        """Number of frames that have arrived and are not read yet."""
        return len(self._inbox)

    @property
    def unacknowledged(self) -> Mapping[str, int]:
        """Number of unacknowledged frames by peer, without peers that have acknowledged all."""
        return self._transport.unacknowledged

    @property
    def dropped(self) -> int:
        """Number of dropped frames and packets since the start: duplicate frames, frames for departed
        processes, and packets that were malformed, from an old epoch, or from a departed process."""
        return self._transport.dropped

    async def close(self) -> None:
        """Close the bus; wait up to half a second until the peers have received all frames."""
        await self._transport.close()


BusFactory = Callable[[str, int], Bus]  # makes the bus of a process name and epoch; needs a running event loop
