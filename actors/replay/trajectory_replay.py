"""Replays the rollout decider on its log, and collects the states of one trajectory.

If a resumed run reuses the trajectory's number, the later trajectory counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from actors.runtime.decider_loop import DecidedEvent, decide_event
from bus.event_log.reader import decode_event, read_events
from bus.event_log.records import Decision, Event
from bus.messages import CodeFinished, CodeOk, Envelope, Output, RunStarted, StartGroup, TrajectoryEnd
from configs.errors import UnusableInput
from policies.rollout.rollout import Rollout
from policies.rollout.trajectory import Trajectory


class ToolResult(NamedTuple):
    """Replaces a logged tool result: the call succeeds and prints `stdout`."""

    seq: int  # of the event
    stdout: str


class ReplayedTrajectory(NamedTuple):
    turn_starts: list[Trajectory]  # states at the start of turns 0, 1, ...
    final: Trajectory
    end: TrajectoryEnd | None  # None: the log ends before the trajectory
    last_results: Mapping[int, int]  # by turn: event with the result of the last call before the turn


def replay_trajectory(
    log: Path, rollout: Rollout, trajectory_id: int, tool_result: ToolResult | None = None
) -> ReplayedTrajectory:
    """Decides on the events up to the trajectory's end. `rollout` must be new.

    Raises UnusableInput if the log lacks the trajectory, or if its events are decided in another
    way than in the run; a replay with another tool result is not compared with the run.
    """
    turn_starts: list[Trajectory] = []
    last_calls: dict[int, tuple[int, int]] = {}  # by turn: call and event
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
        if isinstance(finished, CodeFinished) and before is not None and after is not before:
            last_calls[before.turn] = max(last_calls.get(before.turn, (-1, -1)), (finished.call, event.seq))
        ends = (send.message for send in decided.sends if isinstance(send.message, TrajectoryEnd))
        end = next((each for each in ends if each.trajectory_id == trajectory_id), None)
        if end is not None:
            break
    assert final is not None
    return ReplayedTrajectory(turn_starts, final, end, {turn: seq for turn, (_, seq) in last_calls.items()})


def _get_changed(decided: DecidedEvent, trajectory_id: int) -> Trajectory | None:
    """The state that the event changed, also if the trajectory has ended; None for other trajectories."""
    changed = decided.state
    return changed if isinstance(changed, Trajectory) and changed.trajectory_id == trajectory_id else None


def _read_launch(log: Path, trajectory_id: int) -> Iterator[tuple[Event, Decision | None]]:
    """The events of the latest launch that started the trajectory. Raises UnusableInput."""
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
    assert isinstance(finished, CodeFinished)
    return replace(envelope, message=replace(finished, outcome=CodeOk(Output(stdout))))
