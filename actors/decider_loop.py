"""The one receive loop of every decider: write the event to the log, decide, act once the log has it.

Nothing of what a decider did leaves the process or reaches its files, and nothing that it received is acknowledged,
before the event is committed. So nobody has seen anything of an event that a kill took along, and actors/recovery.py,
which decides on the log again, goes on where the others believe that this process is. Replay (actors/replay.py) is the
same without acting.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import structlog

from actors.clock import Clock
from bus.codec import MalformedFrame, decode, encode
from bus.event_log import EventLog
from bus.messages import AnyMessage, Envelope, GroupAborted, ProtocolError, Shutdown, StartGroup
from bus.transport import Bus, Delivery
from policies.decider import Decider, Send

FINGERPRINT_BYTES = 8
REFUSED = b"refused"  # fingerprint of an event that the decider forbade
_EVENTS_A_TURN = 64  # decided before the event loop comes round, so that what was sent meanwhile goes out
ACTS = 16_384  # that may wait for the log; beyond it nothing is received

Service = Callable[[AnyMessage], Awaitable[None]]
_state_encoder = msgspec.msgpack.Encoder(order="deterministic")


class Observer(Protocol):
    """Writes down what is worth a line in the structured log. It decides nothing, and replay goes without it.

    A line may come before its event is committed, and so a second time from a process that goes on after a kill.
    """

    quiet: bool  # it sees, and says nothing: an earlier life of the process has said it

    def saw(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        """After a decision: what was decided on, and what came of it."""
        ...


def subject_of(message: AnyMessage) -> int | range | None:
    """The trajectory, or those, that a message is about."""
    if isinstance(message, StartGroup | GroupAborted):
        return range(message.first_trajectory_id, message.first_trajectory_id + message.size)
    return getattr(message, "trajectory_id", None)


def encode_effects(sender: str, effects: Sequence[Send]) -> list[bytes]:
    return [encode(Envelope(sender, effect.to, effect.message)) for effect in effects]


def fingerprint(parts: Sequence[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def state_fingerprint(state: msgspec.Struct | None) -> bytes | None:
    return None if state is None else fingerprint([_state_encoder.encode(state)])


class Act(NamedTuple):
    """What an event causes outside this process, or by its services."""

    seq: int  # of the event; of the last one before it where it was not logged
    delivery: Delivery
    frames: Sequence[tuple[str, bytes]]  # to whom, what


class DeciderLoop:
    """Consumes the process's frames; ends after Shutdown, when all that had arrived before is decided and acted on.

    `services` are actors of the same process that decide nothing, such as the metrics file: they get messages that are
    not logged. Without a log, acts follow decisions at once.
    """

    def __init__(
        self,
        bus: Bus,
        log: EventLog | None,
        deciders: Mapping[str, Decider],
        services: Mapping[str, Service],
        clock: Clock,
        observer: Observer | None = None,
    ) -> None:
        self._bus = bus
        self._log = log
        self._deciders = deciders
        self._services = services
        self._clock = clock
        self._observer = observer
        self._logger = structlog.get_logger()
        self._shutting_down = False
        self._num_refused = 0
        self._acts: deque[Act] = deque()
        self._seq = 0  # of the last event that was logged here
        self._committed = 0
        self._changed = asyncio.Event()  # something was committed, or there is something to act on
        self._acted = asyncio.Event()
        if log is not None:
            loop = asyncio.get_running_loop()
            log.on_commit = lambda seq: loop.call_soon_threadsafe(self._note_commit, seq)

    async def run(self) -> None:
        """Raises EventLogFailure."""
        tasks = [asyncio.create_task(self._act()), asyncio.create_task(self._decide_on_all())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    # ---------------------------------------------------------------- deciding

    async def _decide_on_all(self) -> None:
        taken = 0
        while not (self._shutting_down and self._bus.waiting == 0):
            delivery = await self._bus.receive_delivery()
            taken += 1
            if taken % _EVENTS_A_TURN == 0:
                await asyncio.sleep(0)
            self._acts.append(Act(self._seq, delivery, ()) if (act := await self._take(delivery)) is None else act)
            self._changed.set()
            if len(self._acts) > ACTS:
                await self._until_acted(ACTS // 2)
            if self._log is not None and self._log.full:
                self._logger.warning("event_log.filled")
                await asyncio.to_thread(self._log.wait_for_room)
            if self._shutting_down and self._bus.waiting == 0:
                await self._until_acted(0)  # a service may be told something by it

    async def _take(self, delivery: Delivery) -> Act | None:
        try:
            envelope = decode(delivery.frame)
        except MalformedFrame as error:
            self._logger.error("frame.dropped", cause=str(error), num_bytes=len(delivery.frame))
            return None
        actor = envelope.to.rpartition("/")[2]
        if isinstance(envelope.message, Shutdown):
            self._shutting_down = True
        elif actor in self._services:
            await self._services[actor](envelope.message)
        elif actor in self._deciders:
            return await self._decide(actor, self._deciders[actor], envelope, delivery)
        else:
            self._logger.error("message.misdirected", to=envelope.to, kind=type(envelope.message).__name__)
        return None

    async def _decide(self, actor: str, decider: Decider, envelope: Envelope, delivery: Delivery) -> Act:
        event, now = envelope.message, self._clock()
        self._write(now, actor, envelope, delivery)
        try:
            effects = decider.decide(now, event)
        except ProtocolError as error:
            self._num_refused += 1
            kind = type(event).__name__
            self._logger.error("event.refused", actor=actor, kind=kind, cause=str(error), num_refused=self._num_refused)
            if self._log is not None:
                self._log.decided(self._seq, REFUSED, None)
            return Act(self._seq, delivery, ())
        frames = encode_effects(envelope.to, effects)
        if self._log is not None:
            self._log.decided(self._seq, fingerprint(frames), state_fingerprint(decider.state_after(event)))
        if self._observer is not None:
            self._observer.saw(now, event, effects)
        outward: list[tuple[str, bytes]] = []
        for effect, frame in zip(effects, frames, strict=True):
            process, _, actor = effect.to.partition("/")
            if process == self._bus.process and actor not in self._services:
                await self._bus.send_frame(effect.to, frame)  # what comes of it is logged after this event
            else:
                outward.append((effect.to, frame))
        return Act(self._seq, delivery, outward)

    def _write(self, now: float, actor: str, envelope: Envelope, delivery: Delivery) -> None:
        if self._log is not None:
            event = envelope.message
            self._seq = self._log.append(
                *(now, actor, envelope.sender, type(event).__name__, subject_of(event), delivery.frame),
                session=delivery.session,
                number=delivery.number,
            )

    # ---------------------------------------------------------------- acting

    def _note_commit(self, seq: int) -> None:
        self._committed = seq
        self._changed.set()

    async def _act(self) -> None:
        """Until cancelled."""
        while True:
            while self._acts and (self._log is None or self._acts[0].seq <= self._committed):
                act = self._acts.popleft()
                for to, frame in act.frames:
                    await self._bus.send_frame(to, frame)
                self._bus.acknowledge(act.delivery)
            self._acted.set()
            if self._log is not None:
                self._log.check()
            self._changed.clear()
            await self._changed.wait()

    async def _until_acted(self, left: int) -> None:
        """Until no more than `left` acts wait."""
        while len(self._acts) > left:
            self._acted.clear()
            await self._acted.wait()
