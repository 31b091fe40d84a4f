"""The receive loop of all deciders logs an event, decides, and acts after the log has committed the event.

Until the event is committed, none of its effects leaves the process or reaches its files, and its frame is not
acknowledged. An event that is lost in a kill therefore had no visible effect, and actors/runtime/recovery.py, which
decides on the log again, resumes in the state that the peers expect. Replay (actors/replay/replay.py) is the same loop
without acting.
"""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import structlog

from asterism.bus.bus import Bus, Delivery
from asterism.bus.codec import MalformedFrame, decode, encode
from asterism.bus.event_log.records import REFUSED_FINGERPRINT, Decision
from asterism.bus.event_log.writer import EventLog
from asterism.bus.messages import AnyMessage, Envelope, GroupAborted, ProtocolError, Shutdown, StartGroup
from asterism.bus.process.waiting import wait_for_first
from asterism.policies.decider import Decider, Send

FINGERPRINT_BYTES = 8
_EVENTS_PER_YIELD = 64  # decisions between two yields to the event loop, which sends the frames
MAX_PENDING_EFFECTS = 16_384  # limit of events that wait for the log; the loop stops receiving at this bound

Clock = Callable[[], float]
Service = Callable[[AnyMessage], Awaitable[None]]
_state_encoder = msgspec.msgpack.Encoder(order="deterministic")


def make_steady_clock(not_before: float = 0.0) -> Clock:
    """Return a clock in seconds since the epoch that never goes back, also if the system clock is set.

    `not_before` is the last time that an earlier incarnation of the process logged.
    """
    start = max(time.time(), not_before) - time.monotonic()
    return lambda: start + time.monotonic()


class Observer(Protocol):
    """A writer of lines to the structured log. It decides nothing, and replay runs without it.

    A line may precede the commit of its event, so a process that recovers from a kill may write it a second time.
    """

    quiet: bool  # follow decisions without writing: an earlier incarnation of the process has written the lines

    def on_decision(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        """Observe a decision that the decider has made."""
        ...


def get_trajectory_ids(message: AnyMessage) -> int | range | None:
    """Return the trajectory or the trajectories that a message is about."""
    if isinstance(message, StartGroup | GroupAborted):
        return range(message.first_trajectory_id, message.first_trajectory_id + message.size)
    return getattr(message, "trajectory_id", None)


def encode_effects(sender: str, effects: Sequence[Send]) -> list[bytes]:
    return [encode(Envelope(sender, effect.to, effect.message)) for effect in effects]


def compute_fingerprint(parts: Sequence[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def compute_state_fingerprint(state: msgspec.Struct | None) -> bytes | None:
    return None if state is None else compute_fingerprint([_state_encoder.encode(state)])


class DecidedEvent(msgspec.Struct, frozen=True):
    """The result of a decision on one event: live, in recovery or in replay."""

    message: AnyMessage  # message of the event
    effects: Sequence[Send] | str  # effects, or the reason for which the decider refuses the event
    frames: Sequence[bytes]  # frames of the effects
    state: msgspec.Struct | None  # shared with the decider: valid until its next decision

    @property
    def sends(self) -> Sequence[Send]:
        """Return the effects; a refused event has none."""
        return () if isinstance(self.effects, str) else self.effects

    @property
    def fingerprints(self) -> tuple[bytes, bytes | None]:
        """Return the fingerprints of effects and state, as in asterism.bus.event_log.records.Decision."""
        if isinstance(self.effects, str):
            return REFUSED_FINGERPRINT, None
        return compute_fingerprint(self.frames), compute_state_fingerprint(self.state)

    def find_difference(self, decision: Decision | None) -> str:
        """Return "effects", "state" or nothing. An event that a kill left undecided has no difference."""
        if decision is None:
            return ""
        effects, state = self.fingerprints
        if effects != decision.effects:
            return "effects"
        return "state" if state != decision.state else ""


def decide_event(decider: Decider, envelope: Envelope, now: float) -> DecidedEvent:
    try:
        effects = decider.decide(now, envelope.message)
    except ProtocolError as error:
        return DecidedEvent(envelope.message, str(error), (), None)
    frames = encode_effects(envelope.to, effects)
    return DecidedEvent(envelope.message, effects, frames, decider.get_state_after(envelope.message))


class PendingEffects(NamedTuple):
    """Effects of an event outside this process, or on its services."""

    seq: int  # number of the event, or of the last logged event before it if it was not logged
    delivery: Delivery
    frames: Sequence[tuple[str, bytes]]  # (receiver, frame)


class DeciderLoop:
    """A loop that consumes the process's frames; ends after Shutdown, when all earlier frames are decided and acted on.

    `services` are actors of the same process that decide nothing, such as the metrics file; their messages are not
    logged. Without a log, effects are applied immediately.
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
        self._pending_effects: deque[PendingEffects] = deque()
        self._last_logged_seq = 0
        self._committed_seq = 0
        self._work_available = asyncio.Event()  # set by a commit, or by new pending effects
        self._effects_applied = asyncio.Event()
        if log is not None:
            loop = asyncio.get_running_loop()
            log.on_commit = lambda seq: loop.call_soon_threadsafe(self._on_commit, seq)

    async def run(self) -> None:
        """Receive, decide and act until Shutdown. Raises EventLogFailure."""
        await wait_for_first(self._apply_committed_effects(), self._receive_and_decide())

    # ---------------------------------------------------------------- deciding

    async def _receive_and_decide(self) -> None:
        num_received = 0
        while not (self._shutting_down and self._bus.waiting == 0):
            delivery = await self._bus.receive_delivery()
            num_received += 1
            if num_received % _EVENTS_PER_YIELD == 0:
                await asyncio.sleep(0)
            pending = await self._handle_delivery(delivery)
            self._pending_effects.append(pending or PendingEffects(self._last_logged_seq, delivery, ()))
            self._work_available.set()
            if len(self._pending_effects) > MAX_PENDING_EFFECTS:
                await self._wait_for_effects(MAX_PENDING_EFFECTS // 2)
            if self._log is not None and self._log.is_full:
                self._logger.warning("event_log.filled")
                await asyncio.to_thread(self._log.wait_for_space)
            if self._shutting_down and self._bus.waiting == 0:
                await self._wait_for_effects(0)  # the effects may include messages to a service

    async def _handle_delivery(self, delivery: Delivery) -> PendingEffects | None:
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

    async def _decide(self, actor: str, decider: Decider, envelope: Envelope, delivery: Delivery) -> PendingEffects:
        event, now = envelope.message, self._clock()
        self._log_event(now, actor, envelope, delivery)
        decided = decide_event(decider, envelope, now)
        if self._log is not None:
            self._log.append_decision(self._last_logged_seq, *decided.fingerprints)
        if isinstance(cause := decided.effects, str):
            self._num_refused += 1
            kind = type(event).__name__
            self._logger.error("event.refused", actor=actor, kind=kind, cause=cause, num_refused=self._num_refused)
            return PendingEffects(self._last_logged_seq, delivery, ())
        if self._observer is not None:
            self._observer.on_decision(now, event, decided.effects)
        outward: list[tuple[str, bytes]] = []
        for effect, frame in zip(decided.effects, decided.frames, strict=True):
            process, _, actor = effect.to.partition("/")
            if process == self._bus.process and actor not in self._services:
                await self._bus.send_frame(effect.to, frame)  # the frame's own event is logged later
            else:
                outward.append((effect.to, frame))
        return PendingEffects(self._last_logged_seq, delivery, outward)

    def _log_event(self, now: float, actor: str, envelope: Envelope, delivery: Delivery) -> None:
        if self._log is not None:
            event = envelope.message
            self._last_logged_seq = self._log.append(
                *(now, actor, envelope.sender, type(event).__name__, get_trajectory_ids(event), delivery.frame),
                epoch=delivery.epoch,
                number=delivery.number,
            )

    # ---------------------------------------------------------------- acting

    def _on_commit(self, seq: int) -> None:
        self._committed_seq = seq
        self._work_available.set()

    async def _apply_committed_effects(self) -> None:
        """Send the frames of committed events until cancelled."""
        while True:
            while self._pending_effects and (self._log is None or self._pending_effects[0].seq <= self._committed_seq):
                pending = self._pending_effects.popleft()
                for to, frame in pending.frames:
                    await self._bus.send_frame(to, frame)
                self._bus.acknowledge(pending.delivery)
            self._effects_applied.set()
            if self._log is not None:
                self._log.raise_if_failed()
            self._work_available.clear()
            await self._work_available.wait()

    async def _wait_for_effects(self, max_pending: int) -> None:
        while len(self._pending_effects) > max_pending:
            self._effects_applied.clear()
            await self._effects_applied.wait()
