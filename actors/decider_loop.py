"""The one receive loop of every decider: write the event to the log, decide, act.

Replay (actors/replay.py) is the same without the last step.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import structlog

from actors.clock import Clock
from bus.codec import MalformedFrame, decode, encode
from bus.event_log import EventLog
from bus.messages import AnyMessage, Envelope, ProtocolError, Shutdown
from bus.transport import Bus
from policies.decider import Decider, Send

FINGERPRINT_BYTES = 8
REFUSED = b"refused"  # fingerprint of an event that the decider forbade
_EVENTS_A_TURN = 64  # decided before the event loop comes round, so that what was sent meanwhile goes out

Service = Callable[[AnyMessage], Awaitable[None]]
_state_encoder = msgspec.msgpack.Encoder(order="deterministic")


class Observer(Protocol):
    """Writes down what is worth a line in the structured log. It decides nothing, and replay goes without it."""

    def saw(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        """After a decision: what was decided on, and what came of it."""
        ...


def trajectory_of(message: AnyMessage) -> int | None:
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


class DeciderLoop:
    """Consumes the process's frames; ends after Shutdown, when all that had arrived before is decided.

    `services` are actors of the same process that decide nothing, such as the metrics file: they get messages that are
    not logged.
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

    async def run(self) -> None:
        taken = 0
        while not (self._shutting_down and self._bus.waiting == 0):
            frame = await self._bus.receive_frame()
            taken += 1
            if taken % _EVENTS_A_TURN == 0:
                await asyncio.sleep(0)
            try:
                envelope = decode(frame)
            except MalformedFrame as error:
                self._logger.error("frame.dropped", cause=str(error), num_bytes=len(frame))
                continue
            await self._take(envelope, frame)
            if self._log is not None and self._log.full:
                self._logger.warning("event_log.filled")
                await asyncio.to_thread(self._log.wait_for_room)

    async def _take(self, envelope: Envelope, frame: bytes) -> None:
        actor = envelope.to.rpartition("/")[2]
        if isinstance(envelope.message, Shutdown):
            self._shutting_down = True
        elif actor in self._services:
            await self._services[actor](envelope.message)
        elif actor in self._deciders:
            await self._decide(actor, self._deciders[actor], envelope, frame)
        else:
            self._logger.error("message.misdirected", to=envelope.to, kind=type(envelope.message).__name__)

    async def _decide(self, actor: str, decider: Decider, envelope: Envelope, frame: bytes) -> None:
        event, now, seq = envelope.message, self._clock(), 0
        if self._log is not None:
            kind = type(event).__name__
            seq = self._log.append(now, actor, envelope.sender, kind, trajectory_of(event), frame)
        try:
            effects = decider.decide(now, event)
        except ProtocolError as error:
            self._num_refused += 1
            kind = type(event).__name__
            self._logger.error("event.refused", actor=actor, kind=kind, cause=str(error), num_refused=self._num_refused)
            if self._log is not None:
                self._log.decided(seq, REFUSED, None)
            return
        frames = encode_effects(envelope.to, effects)
        if self._log is not None:
            self._log.decided(seq, fingerprint(frames), state_fingerprint(decider.state_after(event)))
        for effect, effect_frame in zip(effects, frames, strict=True):
            await self._bus.send_frame(effect.to, effect_frame)
        if self._observer is not None:
            self._observer.saw(now, event, effects)
