"""Recovery of a killed deciding process decides again on all events of this epoch in its log, and continues.

No effect leaves a process before its event is in the log (actors/runtime/decider_loop.py), so peers only see a pause:
recovered frames have their old numbers, and peers still hold the frames that the killed process did not acknowledge.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from asterism.actors.runtime.decider_loop import MAX_PENDING_EFFECTS, Observer, decide_event
from asterism.bus.addresses import LEARNER, parse_process
from asterism.bus.codec import MalformedFrame, decode
from asterism.bus.event_log.reader import check_complete, find_epoch_start, read_events
from asterism.bus.event_log.records import Decision, Event
from asterism.bus.lanes import BULK, Lane, select_frame_lane, select_lane
from asterism.bus.messages import AnyMessage, BatchReady, StepTrained
from asterism.configs.errors import UnusableInput
from asterism.policies.decider import Decider, Send

PeerLane = tuple[str, Lane]


class NotRecoverable(UnusableInput):
    """The log is damaged, or the code decides differently; `--resume` restarts from the last checkpoint."""


class SentFrames(msgspec.Struct):
    """Last frames to one peer in one lane: possibly unacknowledged frames, then possibly unsent ones.

    Frames may be unsent because effects (actors/runtime/decider_loop.py) wait for the log and for queue space.
    """

    frames: deque[bytes]
    possibly_unsent: deque[tuple[int, bytes]] = msgspec.field(default_factory=deque)  # (number of events before, frame)
    next_number: int = 0

    def add(self, frame: bytes, num_events: int) -> None:
        self.possibly_unsent.append((num_events, frame))
        self.next_number += 1
        while self.possibly_unsent[0][0] < num_events - MAX_PENDING_EFFECTS - 1:
            self.frames.append(self.possibly_unsent.popleft()[1])

    def drop_up_to(self, number: int) -> None:
        """Drop the frames up to this number, which the peer has acknowledged."""
        while self.next_number - len(self.frames) - len(self.possibly_unsent) <= number:
            self.pop_first()

    def pop_first(self) -> bytes | None:
        if self.frames:
            return self.frames.popleft()
        return self.possibly_unsent.popleft()[1] if self.possibly_unsent else None

    def list_frames(self) -> tuple[bytes, ...]:
        return (*self.frames, *(frame for _, frame in self.possibly_unsent))


class Recovery:
    """State of one process at the end of its log, for one epoch: deciders, links and undelivered messages."""

    def __init__(
        self,
        process: str,
        epoch: int,
        deciders: Mapping[str, Decider],
        services: Collection[str],
        window: int,
        observer: Observer | None = None,
    ) -> None:
        """`window` bounds the frames that a peer may not have acknowledged. `observer` follows the logged decisions."""
        self._observer = observer
        self._process = process
        self._epoch = epoch
        self._deciders = deciders
        self._services = services
        self.num_events = 0
        self.last_event_time = 0.0
        self.recovery_s = 0.0
        self._window = window
        self.sent: dict[PeerLane, SentFrames] = {}
        self.received: dict[PeerLane, tuple[int, int]] = {}  # (epoch, next number)
        self.service_messages: list[tuple[str, AnyMessage]] = []  # (service, message)
        self.undecided: list[Decision] = []  # decisions on events that a kill left undecided
        self._batch_frames: dict[int, int] = {}  # step -> number of the frame with BatchReady

    def replay(self, logged: Iterable[tuple[Event, Decision | None]], start_frames: Sequence[bytes]) -> None:
        """Decide again. The process sent `start_frames` to itself at its start. Raises NotRecoverable."""
        began = time.monotonic()
        for frame in start_frames:
            self._get_sent(self._process, select_frame_lane(frame)).add(frame, 0)
        for event, decision in logged:
            self._record_receipt(event)
            if self._observer is not None:
                self._observer.quiet = decision is not None
            new_decision = self._decide(event)
            if decision is None:
                self.undecided.append(new_decision)
            elif decision != new_decision:
                raise NotRecoverable(
                    f"event {event.seq} of {self._process} ({event.actor}, {event.kind}): the decision differs from the "
                    "logged one; --resume restarts from the last checkpoint"
                )
            self.num_events += 1
            self.last_event_time = event.time
        if self._observer is not None:
            self._observer.quiet = False
        self.recovery_s = time.monotonic() - began

    def _get_sent(self, process: str, lane: Lane) -> SentFrames:
        if (process, lane) not in self.sent:
            bound = None if process == self._process else self._window
            self.sent[process, lane] = SentFrames(deque(maxlen=bound))
        return self.sent[process, lane]

    def _record_receipt(self, event: Event) -> None:
        sender, lane = parse_process(event.sender), select_lane(event.kind)
        if sender == self._process:
            if self._get_sent(sender, lane).pop_first() != event.frame:
                raise NotRecoverable(
                    f"event {event.seq} ({event.kind}): {sender} sent it to itself in the log, but not in recovery"
                )
            return
        known = self.received.get((sender, lane), (-1, 0))
        self.received[sender, lane] = max(known, (event.epoch, event.number + 1))

    def _decide(self, event: Event) -> Decision:
        try:
            envelope = decode(event.frame)
        except MalformedFrame as error:
            raise NotRecoverable(
                f"event {event.seq} of {self._process} ({event.actor}, {event.kind}) is damaged ({error}); "
                "--resume restarts from the last checkpoint"
            ) from error
        if isinstance(envelope.message, StepTrained):
            self._drop_trained_batch(envelope.message.step)
        decided = decide_event(self._deciders[event.actor], envelope, event.time)
        if not isinstance(decided.effects, str):
            if self._observer is not None:
                self._observer.on_decision(event.time, decided.message, decided.effects)
            for effect, frame in zip(decided.effects, decided.frames, strict=True):
                self._record_effect(effect, frame)
        return Decision(event.seq, *decided.fingerprints)

    def _drop_trained_batch(self, step: int) -> None:
        """Drop the frames of batches up to this one, which the learner has stored: batches can have gigabytes."""
        number = self._batch_frames.pop(step, None)
        if number is not None:
            self._get_sent(LEARNER, BULK).drop_up_to(number)

    def _record_effect(self, effect: Send, frame: bytes) -> None:
        process, _, actor = effect.to.partition("/")
        if process == self._process and actor in self._services:
            self.service_messages.append((actor, effect.message))
            return
        sent = self._get_sent(process, select_lane(type(effect.message).__name__))
        if isinstance(effect.message, BatchReady):
            self._batch_frames[effect.message.step] = sent.next_number
        sent.add(frame, self.num_events)

    def build_link_state(self) -> dict[PeerLane, tuple[int, Sequence[bytes]]]:
        """Build the arguments of asterism.bus.bus.Bus.restore."""
        return {peer: (sent.next_number, sent.list_frames()) for peer, sent in self.sent.items()}


def recover(
    path: Path,
    process: str,
    epoch: int,
    deciders: Mapping[str, Decider],
    services: Collection[str],
    window: int,
    start_frames: Sequence[bytes],
    observer: Observer | None = None,
) -> Recovery | None:
    """Return the recovered state, or None if the log has no event of this epoch, because the process starts.

    Raises NotRecoverable, and UnusableLog if log.keep_steps has removed events that recovery needs.
    """
    first = find_epoch_start(path, epoch)
    if first is None:
        return None
    check_complete(path, since_seq=first)
    recovery = Recovery(process, epoch, deciders, services, window, observer)
    with closing(read_events(path, since_seq=first)) as logged:  # closed on this thread, also after NotRecoverable
        recovery.replay(logged, start_frames)
    return recovery
