"""Replay: feed every decider its log again and compare what it does with what it did.

The same loop as actors/decider_loop.py, without acting.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from actors.decider_loop import REFUSED, encode_effects, fingerprint, state_fingerprint
from actors.wiring import HEAD, ROLLOUT, deciders_of
from bus.codec import decode
from bus.event_log import Decision, Event
from bus.event_reading import read_events
from bus.messages import ProtocolError
from configs.run_folder import RunFolder
from configs.schema import Run
from policies.decider import Decider

DECIDING_PROCESSES = (HEAD, ROLLOUT)


class Difference(msgspec.Struct, frozen=True):
    """The first event at which the replay does something else."""

    process: str
    seq: int
    actor: str
    kind: str
    what: str  # "effects" or "state"
    effects: str  # what the replay did, readable


class Replay(msgspec.Struct, frozen=True):
    events: int
    difference: Difference | None

    @property
    def identical(self) -> bool:
        return self.difference is None


def replay_run(run: Run, folder: RunFolder) -> Replay:
    """All deciding processes in turn. Raises FileNotFoundError where a log is missing."""
    total = 0
    for process in DECIDING_PROCESSES:
        path = folder.events / f"{process}.sqlite"
        if not path.exists():
            raise FileNotFoundError(f"{path}: there is no event log; was the run started with log.events = false?")
        replay = replay_process(process, path, deciders_of(process, run, folder))
        total += replay.events
        if not replay.identical:
            return Replay(total, replay.difference)
    return Replay(total, None)


def replay_process(process: str, path: Path, deciders: Mapping[str, Decider]) -> Replay:
    count = 0
    for event, decision in read_events(path):
        count += 1
        difference = _decide_again(process, deciders[event.actor], event, decision)
        if difference is not None:
            return Replay(count, difference)
    return Replay(count, None)


def _decide_again(process: str, decider: Decider, event: Event, decision: Decision | None) -> Difference | None:
    envelope = decode(event.frame)
    try:
        effects = decider.decide(event.time, envelope.message)
    except ProtocolError as error:
        shown, effects_now, state_now = str(error), REFUSED, None
    else:
        shown = "\n".join(f"{effect.to} <- {effect.message}" for effect in effects)
        effects_now = fingerprint(encode_effects(envelope.to, effects))
        state_now = state_fingerprint(decider.state_after(envelope.message))
    if decision is None:  # the process was killed between logging the event and deciding on it
        return None
    for what, now, then in (("effects", effects_now, decision.effects), ("state", state_now, decision.state)):
        if now != then:
            return Difference(process, event.seq, event.actor, event.kind, what, shown)
    return None
