"""All links of one process: the machines of bus.link, driven by an event loop over a wire.

What is sent to a peer within one turn of the loop travels as one parcel, and nobody waits for it to fill. A sender waits
while the window of its lane is full. Acknowledgements go out a moment after the first frame that they cover is done
with, at the latest when a quarter of a window is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import structlog

from bus.lanes import LANES, Lane
from bus.link import Incoming, Outgoing
from bus.parcels import PARCEL_FRAMES, Ack, Parcel
from bus.transport import Delivery, Inbox, Sent, Taken

Answer = Callable[[Ack], None]
MAX_LINKS = 65_536  # lanes that may come in; a parcel of a further one is dropped

_FLUSH_S = 0.5  # how long closing waits for peers that have not received everything
_BETWEEN_ASKING_S = 0.005  # while closing
_PATIENCE_S = 2.0  # between two questions at most


class Limits(msgspec.Struct, frozen=True):
    window_messages: int  # of a lane of a link, sent and not acknowledged
    window_bytes: int = 256 << 20  # as well; the last frame may go beyond
    acknowledge_after_s: float = 0.01
    ask_after_s: float | None = 0.5  # of silence, where something is not acknowledged; None where no wire breaks


class Wire(Protocol):
    """Carries parcels to peers, calls Links.arrived with those that come, and Links.hear with the answers to its own."""

    def carry(self, process: str, lane: Lane, parcel: Parcel) -> bool:
        """Whether there was room. If not, Links.carry_on is called when there is."""
        ...

    def part(self, process: str) -> None:
        """Nothing more is sent to that process, for the time being."""
        ...

    async def close(self) -> None: ...


class _Way:
    """To one lane of one peer."""

    __slots__ = ("asked_at", "blocked", "dirty", "open", "outgoing", "patience_s", "room", "turn")

    def __init__(self, outgoing: Outgoing) -> None:
        self.outgoing = outgoing
        self.turn = asyncio.Lock()  # one sender waits for room at a time, the others queue
        self.room = asyncio.Event()
        self.dirty = False  # will be flushed as the loop comes round
        self.blocked = False  # the wire has no room
        self.open = False  # something may be held
        self.asked_at = 0.0  # or heard of something new
        self.patience_s = 0.0


class _Source:
    """One lane of one peer, as a receiver."""

    __slots__ = ("answer", "due", "incoming", "told")

    def __init__(self, incoming: Incoming) -> None:
        self.incoming = incoming
        self.answer: Answer | None = None  # the way by which its last parcel came, back
        self.due = False  # will be told what is acknowledged
        self.told = 0


class Links:
    """Implements bus.transport.Transport. `wire` is to be set before anything else."""

    def __init__(self, process: str, session: int, inbox: Inbox, limits: Limits) -> None:
        self.process = process
        self.session = session
        self.inbox = inbox
        self.wire: Wire
        self._limits = limits
        self._acknowledge_each = max(1, limits.window_messages // 4)
        self._loop = asyncio.get_running_loop()
        self._ways: dict[tuple[str, Lane], _Way] = {}
        self._sources: dict[tuple[str, Lane], _Source] = {}
        self._dirty: list[tuple[str, Lane]] = []
        self._due: list[_Source] = []
        self._asking: asyncio.TimerHandle | None = None
        self._progress = asyncio.Event()  # something has been heard; closing waits for it
        self._closed = False
        self._gone: dict[str, int] = {}  # who will not come back, and what was dropped since
        self.first_session = 0  # lower ones, but for 0, are of earlier launches: what comes in them is dropped
        self.num_dropped = 0  # what was malformed, not expected, or too many; what was for or from those who are gone

    # ---------------------------------------------------------------- sending

    async def send_frame(self, process: str, lane: Lane, frame: bytes) -> None:
        way = self._ways.get((process, lane)) or self._new_way(process, lane)
        if self._is_full(way) or way.turn.locked():
            async with way.turn:
                while self._is_full(way) and not self._closed:
                    way.room.clear()
                    await way.room.wait()
        if self._closed:
            raise ConnectionError(f"the bus of {self.process} is closed")
        if process in self._gone:
            self._drop(process)
            return
        way.outgoing.add(frame)
        if not way.open:
            self._watch(way)
        if way.outgoing.num_unsent >= PARCEL_FRAMES:
            self._flush(process, lane, way)
        elif not way.dirty:
            self._flush_soon(process, lane, way)

    def _new_way(self, process: str, lane: Lane) -> _Way:
        way = self._ways[process, lane] = _Way(Outgoing(self.process, self.session, process))
        return way

    def _is_full(self, way: _Way) -> bool:
        outgoing = way.outgoing
        return outgoing.held >= self._limits.window_messages or outgoing.num_bytes >= self._limits.window_bytes

    def _flush_soon(self, process: str, lane: Lane, way: _Way) -> None:
        way.dirty = True
        if not self._dirty:
            self._loop.call_soon(self._flush_all)
        self._dirty.append((process, lane))

    def _flush_all(self) -> None:
        dirty, self._dirty = self._dirty, []
        for process, lane in dirty:
            way = self._ways[process, lane]
            way.dirty = False
            self._flush(process, lane, way)

    def _flush(self, process: str, lane: Lane, way: _Way) -> None:
        while not (way.blocked or self._closed) and (parcel := way.outgoing.parcel()) is not None:
            if not self.wire.carry(process, lane, parcel):
                way.outgoing.refused(parcel)
                way.blocked = True

    def carry_on(self, process: str, lane: Lane) -> None:
        """The wire has room again."""
        way = self._ways[process, lane]
        way.blocked = False
        self._flush(process, lane, way)

    def hear(self, process: str, lane: Lane, ack: Ack) -> None:
        """What that process answers."""
        way = self._ways[process, lane]
        before = (way.outgoing.base, way.outgoing.received)
        if not way.outgoing.hear(ack):
            self.num_dropped += 1
            return
        if (way.outgoing.base, way.outgoing.received) != before:
            way.asked_at, way.patience_s = self._loop.time(), self._limits.ask_after_s or 0.0
        if not self._is_full(way):
            way.room.set()
        self._flush(process, lane, way)
        self._progress.set()

    # ---------------------------------------------------------------- asking

    def _watch(self, way: _Way) -> None:
        way.open = True
        way.asked_at, way.patience_s = self._loop.time(), self._limits.ask_after_s or 0.0
        if self._asking is None and self._limits.ask_after_s is not None:
            self._asking = self._loop.call_later(self._limits.ask_after_s, self._ask_the_silent)

    def _ask_the_silent(self) -> None:
        """Those who hold something that is not acknowledged, and have heard of nothing new for a while."""
        now, any_open = self._loop.time(), False
        for (process, lane), way in self._ways.items():
            if way.open and not way.outgoing.held:
                way.open = False
            if not way.open:
                continue
            any_open = True
            if now - way.asked_at >= way.patience_s:
                way.asked_at, way.patience_s = now, min(2 * way.patience_s, _PATIENCE_S)
                self.wire.carry(process, lane, way.outgoing.question())
        after_s = self._limits.ask_after_s
        self._asking = self._loop.call_later(after_s, self._ask_the_silent) if any_open and after_s else None

    def ask(self, process: str) -> None:
        """That process may be another one than before."""
        for lane in LANES:
            way = self._ways.get((process, lane))
            if way is not None and way.outgoing.held:
                self.wire.carry(process, lane, way.outgoing.question())

    # ---------------------------------------------------------------- receiving

    def arrived(self, lane: Lane, parcel: Parcel, answer: Answer) -> int:
        """Puts what is new into the inbox, and says how much that is."""
        if parcel.to != self.process or 0 < parcel.session < self.first_session:
            self.num_dropped += 1
            return 0
        if parcel.sender in self._gone:
            self._drop(parcel.sender)
            return 0
        source = self._sources.get((parcel.sender, lane))
        if source is None:
            if len(self._sources) >= MAX_LINKS:
                self.num_dropped += 1
                return 0
            source = self._sources[parcel.sender, lane] = _Source(Incoming(self.session))
        incoming = source.incoming
        frames = incoming.take(parcel)
        if parcel.session == incoming.session:
            source.answer = answer
        if frames:
            sender, session, first = parcel.sender, parcel.session, incoming.expected - len(frames)
            numbered = enumerate(frames, first)
            self.inbox.put(lane, [Delivery(frame, sender, lane, session, number) for number, frame in numbered])
        if incoming.answer_due:
            self._tell(source)
        return len(frames)

    def acknowledge(self, delivery: Delivery) -> None:
        source = self._sources.get((delivery.sender, delivery.lane))
        if source is None or not source.incoming.acknowledge(delivery.session, delivery.number):
            return
        if not source.due:
            source.due = True
            if not self._due:
                self._loop.call_later(self._limits.acknowledge_after_s, self._tell_all)
            self._due.append(source)
        if source.incoming.acknowledged - source.told >= self._acknowledge_each:
            self._tell(source)

    def _tell(self, source: _Source) -> None:
        source.told = source.incoming.acknowledged
        if source.answer is not None and not self._closed:
            source.answer(source.incoming.ack())

    def _tell_all(self) -> None:
        due, self._due = self._due, []
        for source in due:
            source.due = False
            if source.told != source.incoming.acknowledged:
                self._tell(source)

    # ---------------------------------------------------------------- other lives

    def restore(self, sent: Sent, taken: Taken) -> None:
        if self._ways or self._sources:
            raise RuntimeError("links are restored before anything is sent or has arrived")
        for (process, lane), (session, expected) in taken.items():
            self._sources[process, lane] = source = _Source(Incoming(self.session, session, expected))
            source.told = expected
        for (process, lane), (next_number, frames) in sent.items():
            way = self._new_way(process, lane)
            way.outgoing.restore(next_number, frames)
            if process in self._gone:
                self._drop(process, way.outgoing.forget())
            elif frames:
                self._watch(way)
                self._flush_soon(process, lane, way)

    def forget(self, process: str) -> None:
        self._let_go(process)

    def _let_go(self, process: str) -> int:
        """How many frames were held."""
        num_held = 0
        for lane in LANES:
            way = self._ways.get((process, lane))
            if way is not None:
                num_held += way.outgoing.forget()
                way.blocked = False
                way.room.set()
        self.wire.part(process)
        return num_held

    def give_up(self, process: str) -> None:
        """It will not come back: what is held for it is dropped, and so is what will be sent to it or arrive from it."""
        if process not in self._gone:
            self._gone[process] = 0
            self._drop(process, self._let_go(process))

    def _drop(self, gone: str, count: int = 1) -> None:
        self.num_dropped += count
        if count and not self._gone[gone]:
            structlog.get_logger().warning(
                "frames.dropped", peer=gone, cause="it is gone; further ones are dropped, too"
            )
        self._gone[gone] += count

    # ---------------------------------------------------------------- gauges

    @property
    def unacknowledged(self) -> Mapping[str, int]:
        held: dict[str, int] = {}
        for (process, _), way in self._ways.items():
            if way.outgoing.held:
                held[process] = held.get(process, 0) + way.outgoing.held
        return held

    @property
    def dropped(self) -> int:
        return self.num_dropped + sum(source.incoming.dropped for source in self._sources.values())

    # ---------------------------------------------------------------- ending

    async def close(self) -> None:
        if self._closed:
            return
        self._tell_all()
        await self._until_received()
        self._closed = True
        if self._asking is not None:
            self._asking.cancel()
        for way in self._ways.values():
            way.room.set()
        await self.wire.close()

    async def _until_received(self) -> None:
        """By all peers, up to half a second."""
        deadline = self._loop.time() + _FLUSH_S
        self._flush_all()
        while late := [key for key, way in self._ways.items() if way.outgoing.received < way.outgoing.next]:
            for process, lane in late:
                self.wire.carry(process, lane, self._ways[process, lane].outgoing.question())
            self._progress.clear()
            try:
                await asyncio.wait_for(self._progress.wait(), deadline - self._loop.time())
            except TimeoutError:
                return
            await asyncio.sleep(_BETWEEN_ASKING_S)  # others answer meanwhile
