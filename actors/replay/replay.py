"""Replay decides again on every logged event and compares the effects and states with the log.

The loop is the loop of actors/runtime/decider_loop.py, without acting.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from asterism.actors.runtime.decider_loop import DecidedEvent, decide_event
from asterism.actors.runtime.wiring import build_deciders
from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.bus.event_log.reader import check_complete, decode_event, list_removed_events, read_events, read_last_seq
from asterism.bus.event_log.records import Decision, Event
from asterism.bus.messages import (
    BatchReady,
    CodeFinished,
    CodeOk,
    Envelope,
    EnvironmentReturned,
    Observation,
    Output,
    RunStarted,
    StartGroup,
    TrajectoryEnd,
)
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.decider import Decider, Send
from asterism.policies.rollout.rollout import Rollout
from asterism.policies.rollout.trajectory import Trajectory

DECIDING_PROCESSES = (HEAD, ROLLOUT)
_EVENTS_PER_READ = 4096  # limit of a read: while a read lasts, the log's writer cannot shorten the write-ahead file


class SentCounts(msgspec.Struct):
    """Messages that an actor has sent in this launch of the run, by receiver and kind."""

    since: float
    messages: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter[tuple[str, str]])


class ReplayDifference(msgspec.Struct, frozen=True):
    """The first event at which replay and log differ."""

    process: str
    event: Event
    what: str  # "effects" or "state"
    effects: Sequence[Send] | str  # effects of the replay, or the reason for which it refuses the event
    state: msgspec.Struct | None  # state of the replay, if the decider reports one
    sent: SentCounts  # messages sent before the event
    fingerprint: bytes  # fingerprint of the run's effects


class ReplayResult(msgspec.Struct, frozen=True):
    num_events: int
    difference: ReplayDifference | None
    num_skipped: int = 0  # events of launches that log.keep_steps has removed in part

    @property
    def identical(self) -> bool | None:
        """Return whether replay and log are equal, or None if they are, but some events could not be replayed."""
        if self.difference is not None:
            return False
        return None if self.num_skipped else True


def replay_run(run: RunConfig, folder: RunFolder) -> ReplayResult:
    """Replay each deciding process. Raises UnusableInput if a log is missing."""
    replays: list[LogReplay] = []
    for process in DECIDING_PROCESSES:
        replays.append(LogReplay(process, find_log(folder, process), build_deciders(process, run, folder)))
        replays[-1].catch_up()
        if replays[-1].difference is not None:
            break
    return sum_results(replays)


def sum_results(replays: Sequence[LogReplay]) -> ReplayResult:
    difference = next((each.difference for each in replays if each.difference is not None), None)
    return ReplayResult(sum(each.num_events for each in replays), difference, sum(each.num_skipped for each in replays))


def find_log(folder: RunFolder, process: str) -> Path:
    """Return the path of the process's log. Raises UnusableInput if it is missing."""
    path = folder.events / f"{process}.sqlite"
    if not path.exists():
        raise UnusableInput(f"{path}: there is no event log; was the run started with log.events = false?")
    return path


def replay_process(process: str, path: Path, deciders: Mapping[str, Decider]) -> ReplayResult:
    """Replay from the first launch that is still complete in the log."""
    replay = LogReplay(process, path, deciders)
    replay.catch_up()
    return sum_results([replay])


class LogReplay:
    """A replay of one log up to its first difference, in several parts if the log grows."""

    def __init__(self, process: str, path: Path, deciders: Mapping[str, Decider]) -> None:
        self._process, self._path, self._deciders = process, path, deciders
        self._sent: dict[str, SentCounts] = {}
        self._next_seq = since = find_first_complete_seq(path)
        self.num_events = 0
        self.num_skipped = sum(1 for event, _ in read_events(path) if event.seq < since) if since > 1 else 0
        self.difference: ReplayDifference | None = None

    @property
    def num_left(self) -> int:
        return max(0, read_last_seq(self._path) - self._next_seq + 1)

    def catch_up(self, *, growing: bool = False, proceed: Callable[[], bool] = lambda: True) -> None:
        """Replay to the end of the log while `proceed()` is true; it is called every few thousand events.

        A process may still write its decision on the last event of a `growing` log.
        """
        while self.difference is None and proceed():
            with closing(read_events(self._path, since_seq=self._next_seq)) as events:
                logged = list(islice(events, _EVENTS_PER_READ))
            if growing and logged and logged[-1][1] is None:
                logged.pop()
            if not logged:
                return
            for event, decision in logged:
                self._decide(event, decision)
                if self.difference is not None:
                    return

    def _decide(self, event: Event, decision: Decision | None) -> None:
        decided = decide_event(self._deciders[event.actor], decode_event(self._path, event), event.time)
        self._next_seq = event.seq + 1
        self.num_events += 1
        before = self._sent.setdefault(event.actor, SentCounts(event.time))
        if event.kind == RunStarted.__name__:
            before = self._sent[event.actor] = SentCounts(event.time)
        what = decided.find_difference(decision)
        if what and decision is not None:
            self.difference = ReplayDifference(
                self._process, event, what, decided.effects, decided.state, before, decision.effects
            )
            return
        before.messages.update((send.to, type(send.message).__name__) for send in decided.sends)


def find_first_complete_seq(path: Path) -> int:
    """Return the first event of the first launch that is still complete in the log.

    This is 1 if nothing was removed, and a number past the log's end if every launch lacks events.
    """
    last = max((each.last for each in list_removed_events(path)), default=0)
    if not last:
        return 1
    launches = read_events(path, kinds=[RunStarted.__name__], since_seq=last + 1)
    return next((started.seq for started, _ in launches), sys.maxsize)


def replay_until(path: Path, deciders: Mapping[str, Decider], seq: int) -> Event:
    """Bring the deciders to their state after event `seq`. Raises UnusableInput if there is no such event."""
    since = find_first_complete_seq(path)
    if seq < since:
        check_complete(path, since_seq=1)
    for event, _, _ in redecide_all(path, deciders, since=since):
        if event.seq == seq:
            return event
    raise UnusableInput(f"{path}: there is no event {seq}")


def replay_before(path: Path, deciders: Mapping[str, Decider], until: float) -> None:
    """Bring the deciders to their state at `until`, in seconds since the epoch.

    Raises UnusableLog if log.keep_steps has removed the events that this state follows from.
    """
    for _ in redecide_complete_launches(path, deciders, until=until):
        pass


def redecide_complete_launches(
    path: Path, deciders: Mapping[str, Decider], *, until: float | None = None
) -> Iterator[tuple[Event, DecidedEvent]]:
    """Decide again, from the first launch that is still complete in the log.

    Raises UnusableLog if log.keep_steps has removed events of every launch.
    """
    num_decided = 0
    for event, _, decided in redecide_all(path, deciders, since=find_first_complete_seq(path), until=until):
        num_decided += 1
        yield event, decided
    if not num_decided:
        check_complete(path, since_seq=1)


def redecide_all(
    path: Path, deciders: Mapping[str, Decider], *, since: int, until: float | None = None
) -> Iterator[tuple[Event, Decision | None, DecidedEvent]]:
    """Decide again from event number `since`, up to the time `until` (seconds since the epoch) if it is given."""
    for event, decision in read_events(path, since_seq=since):
        if until is not None and event.time > until:
            return
        yield event, decision, decide_event(deciders[event.actor], decode_event(path, event), event.time)


def list_batches(decided: DecidedEvent) -> list[BatchReady]:
    return [send.message for send in decided.sends if isinstance(send.message, BatchReady)]


# ---------------------------------------------------------------- one trajectory


class ResultOverride(NamedTuple):
    """A replacement of a logged tool result: the call succeeds and prints `stdout`."""

    seq: int  # number of the event with the result
    stdout: str


class ReplayedTrajectory(NamedTuple):
    turn_starts: list[Trajectory]  # states at the start of turns 0, 1, ...
    final: Trajectory
    end: TrajectoryEnd | None  # None: the log ends before the trajectory
    last_results: Mapping[int, int]  # turn -> event with the result of the last call before it


def replay_trajectory(
    log: Path, rollout: Rollout, trajectory_id: int, tool_result: ResultOverride | None = None
) -> ReplayedTrajectory:
    """Decide on events up to the trajectory's end. `rollout` must be new. The latest trajectory of the number counts.

    Raises UnusableInput if the log lacks the trajectory, or if its events are decided in another
    way than in the run; a replay with another tool result is not compared with the run.
    """
    turn_starts: list[Trajectory] = []
    last_calls: dict[int, tuple[int, int]] = {}  # turn -> call and event
    final, end = None, None
    for event, decision in _read_launch(log, trajectory_id):
        envelope = decode_event(log, event)
        if tool_result is not None and event.seq == tool_result.seq:
            envelope = _replace_output(envelope, tool_result.stdout)
        before = rollout.trajectories.get(trajectory_id)
        decided = decide_event(rollout, envelope, event.time)
        if tool_result is None and event.trajectory == trajectory_id and decided.find_difference(decision):
            raise UnusableInput(
                f"{log}: trajectory {trajectory_id} replays differently from event {event.seq} on: config.toml, the "
                "tokenizer or the program has changed since the run, or log.keep_steps has removed events"
            )
        after = final = _get_changed(decided, trajectory_id) or rollout.trajectories.get(trajectory_id) or final
        if after is None:
            continue
        if after.phase == "leasing" and after.turn == len(turn_starts):
            turn_starts.append(after)
        finished = envelope.message
        if isinstance(finished, CodeFinished | EnvironmentReturned) and before is not None and after is not before:
            last_calls[before.turn] = max(last_calls.get(before.turn, (-1, -1)), (finished.call, event.seq))
        ends = (send.message for send in decided.sends if isinstance(send.message, TrajectoryEnd))
        end = next((each for each in ends if each.trajectory_id == trajectory_id), None)
        if end is not None:
            break
    assert final is not None
    return ReplayedTrajectory(turn_starts, final, end, {turn: seq for turn, (_, seq) in last_calls.items()})


def _get_changed(decided: DecidedEvent, trajectory_id: int) -> Trajectory | None:
    """Return the state that the event changed, also if the trajectory has ended, or None for other trajectories."""
    changed = decided.state
    return changed if isinstance(changed, Trajectory) and changed.trajectory_id == trajectory_id else None


def _read_launch(log: Path, trajectory_id: int) -> Iterator[tuple[Event, Decision | None]]:
    """Return the events of the latest launch that started the trajectory. Raises UnusableInput."""
    starts = read_events(log, trajectory=trajectory_id, with_group=True, kinds=[StartGroup.__name__])
    start = max((event.seq for event, _ in starts), default=None)
    if start is None:
        raise UnusableInput(f"{log}: no trajectory {trajectory_id}")
    launches = [event.seq for event, _ in read_events(log, kinds=[RunStarted.__name__])]
    since = max((seq for seq in launches if seq < start), default=1)
    until = min((seq for seq in launches if seq > start), default=None)
    return takewhile(lambda logged: logged[0].seq != until, read_events(log, since_seq=since))


def _replace_output(envelope: Envelope, stdout: str) -> Envelope:
    finished = envelope.message
    assert isinstance(finished, CodeFinished | EnvironmentReturned)
    outcome = CodeOk(Output(stdout)) if isinstance(finished, CodeFinished) else Observation(stdout)
    return replace(envelope, message=replace(finished, outcome=outcome))
