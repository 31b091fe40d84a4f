"""Replay: feed every decider its log again and compare what it does with what it did.

The same loop as actors/decider_loop.py, without acting.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from actors.decider_loop import REFUSED, encode_effects, fingerprint, state_fingerprint
from actors.wiring import HEAD, ROLLOUT, deciders_of
from bus.event_log import Decision, Event
from bus.event_reading import check_whole, envelope_of, missing, read_events
from bus.messages import AnyMessage, BatchReady, Envelope, ProtocolError, RunStarted
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import Run
from policies.decider import Decider, Send

DECIDING_PROCESSES = (HEAD, ROLLOUT)


class Sent(msgspec.Struct):
    """What an actor has sent since its life began: how many of each kind to each receiver."""

    since: float
    messages: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter[tuple[str, str]])


class Difference(msgspec.Struct, frozen=True):
    """The first event at which the replay does something else."""

    process: str
    event: Event
    what: str  # "effects" or "state"
    effects: Sequence[Send] | str  # of the replay; why it refuses the event, if it does
    state: msgspec.Struct | None  # of the replay, where the decider gives one
    sent: Sent  # before the event
    fingerprint: bytes  # of the run's effects


class Replay(msgspec.Struct, frozen=True):
    events: int
    difference: Difference | None
    left_out: int = 0  # events of lives of the run that log.keep_steps has removed a part of

    @property
    def identical(self) -> bool | None:
        """None where nothing differs, and not all could be replayed."""
        if self.difference is not None:
            return False
        return None if self.left_out else True


def replay_run(run: Run, folder: RunFolder) -> Replay:
    """All deciding processes in turn. Raises UnusableInput where a log is missing."""
    events, left_out = 0, 0
    for process in DECIDING_PROCESSES:
        path = folder.events / f"{process}.sqlite"
        if not path.exists():
            raise UnusableInput(f"{path}: there is no event log; was the run started with log.events = false?")
        replay = replay_process(process, path, deciders_of(process, run, folder))
        events, left_out = events + replay.events, left_out + replay.left_out
        if replay.difference is not None:
            return Replay(events, replay.difference, left_out)
    return Replay(events, None, left_out)


def replay_process(process: str, path: Path, deciders: Mapping[str, Decider]) -> Replay:
    """From the first life of the run of which every event is kept."""
    count = 0
    sent: dict[str, Sent] = {}
    since = whole_since(path)
    left_out = sum(1 for event, _ in read_events(path) if event.seq < since) if since > 1 else 0
    for event, decision, done in decide_all_again(path, deciders, since=since):
        count += 1
        before = sent.setdefault(event.actor, Sent(event.time))
        if event.kind == RunStarted.__name__:
            before = sent[event.actor] = Sent(event.time)
        what = done.other_than(decision)
        if what and decision is not None:
            found = Difference(process, event, what, done.effects, done.state, before, decision.effects)
            return Replay(count, found, left_out)
        if not isinstance(done.effects, str):
            before.messages.update((effect.to, type(effect.message).__name__) for effect in done.effects)
    return Replay(count, None, left_out)


def whole_since(path: Path) -> int:
    """The number of the event with which the first life begins of which every event is kept: 1 where nothing was removed,
    and past the log's end where every life lacks some."""
    last = max((each.last for each in missing(path)), default=0)
    if not last:
        return 1
    lives = read_events(path, kinds=[RunStarted.__name__], since=last + 1)
    return next((life.seq for life, _ in lives), sys.maxsize)


def replay_until(path: Path, deciders: Mapping[str, Decider], seq: int) -> Event:
    """Leaves the deciders as they were after the event of that number. Raises UnusableInput if there is none."""
    since = whole_since(path)
    if seq < since:
        check_whole(path, since=1)
    for event, _, _ in decide_all_again(path, deciders, since=since):
        if event.seq == seq:
            return event
    raise UnusableInput(f"{path}: there is no event {seq}")


def replay_before(path: Path, deciders: Mapping[str, Decider], moment: float) -> None:
    """Leaves the deciders as they were at a time, in seconds since the epoch. Raises UnusableLog where log.keep_steps has
    removed what they were."""
    decided = decide_all_again(path, deciders, since=whole_since(path), until=moment)
    if not sum(1 for _ in decided):
        check_whole(path, since=1)


class Done(msgspec.Struct, frozen=True):
    """What a decider has done with an event."""

    message: AnyMessage  # the event's
    effects: Sequence[Send] | str  # or why the event is refused
    frames: Sequence[bytes]  # of the effects
    state: msgspec.Struct | None
    fingerprints: tuple[bytes, bytes | None]  # of effects and state, as bus.event_log.Decision has them

    def other_than(self, decision: Decision | None) -> str:
        """What differs; nothing where the process was killed between logging the event and deciding on it."""
        if decision is None:
            return ""
        then = decision.effects, decision.state
        differing = (what for what, a, b in zip(("effects", "state"), self.fingerprints, then, strict=True) if a != b)
        return next(differing, "")


def decide_all_again(
    path: Path, deciders: Mapping[str, Decider], *, since: int, until: float | None = None
) -> Iterator[tuple[Event, Decision | None, Done]]:
    """From event number `since` on, up to a time in seconds since the epoch, if one is given."""
    for event, decision in read_events(path, since=since):
        if until is not None and event.time > until:
            return
        yield event, decision, decide_again(deciders[event.actor], envelope_of(path, event), event.time)


def batches_of(done: Done) -> list[BatchReady]:
    """What goes to the learner."""
    sends = () if isinstance(done.effects, str) else done.effects
    return [send.message for send in sends if isinstance(send.message, BatchReady)]


def decide_again(decider: Decider, envelope: Envelope, at: float) -> Done:
    try:
        effects = decider.decide(at, envelope.message)
    except ProtocolError as error:
        return Done(envelope.message, str(error), (), None, (REFUSED, None))
    frames, state = encode_effects(envelope.to, effects), decider.state_after(envelope.message)
    return Done(envelope.message, effects, frames, state, (fingerprint(frames), state_fingerprint(state)))
