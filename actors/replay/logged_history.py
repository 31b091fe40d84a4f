"""Reads a trajectory's history from the event logs of a run."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from analysis.what_if.trajectory_replay import LoggedEvent, TrajectoryEnd, TrajectoryHistory
from bus.addresses import HEAD
from bus.event_log.reader import decode_event, read_events
from bus.event_log.records import Event
from bus.messages import EngineLeft, ExecutorLeft, GroupAborted, RunStarted, StartGroup
from configs.errors import UnusableInput
from configs.run_folder import RunFolder

_SHARED_KINDS = ("RunStarted", "StartGroup", "GroupAborted", "ExecutorLeft", "EngineLeft")  # about many trajectories

_END_KINDS = tuple(kind.__name__ for kind in get_args(TrajectoryEnd))


def read_history(folder: RunFolder, trajectory_id: int) -> TrajectoryHistory:
    """The latest trajectory with this number, since a resumed run reuses numbers. Raises UnusableInput."""
    logs = sorted(folder.events.glob("rollout-*.sqlite"))
    if not logs:
        raise UnusableInput(
            f"{folder.events}: there is no event log of a rollout process; was the run started with log.events = false?"
        )
    histories = [found for log in logs if (found := _read_history_from(log, trajectory_id)) is not None]
    if not histories:
        raise UnusableInput(f"{folder.events}: no log has trajectory {trajectory_id}")
    return max(histories, key=lambda history: history.started_at)


def read_end_at_head(folder: RunFolder, history: TrajectoryHistory) -> TrajectoryEnd | None:
    """The end as the head received it; the rollout log may lack the end of a lost trajectory."""
    log = folder.events / f"{HEAD}.sqlite"
    if not log.exists():
        return None
    end_events = (event for event, _ in read_events(log, trajectory=history.trajectory_id, kinds=_END_KINDS))
    ends = [
        decode_event(log, event).message
        for event in end_events
        if event.actor == "buffer" and event.time >= history.started_at
    ]
    end = ends[-1] if ends else None
    assert end is None or isinstance(end, TrajectoryEnd)
    return end


def _read_history_from(log: Path, trajectory_id: int) -> TrajectoryHistory | None:
    common = (event for event, _ in read_events(log, kinds=_SHARED_KINDS))
    own = (event for event, _ in read_events(log, trajectory=trajectory_id))
    return collect_history(heapq.merge(common, own, key=lambda event: event.seq), trajectory_id, log)


def collect_history(events: Iterable[Event], trajectory_id: int, log: Path) -> TrajectoryHistory | None:
    """The trajectory's history in `events`, which are in order; events of other trajectories may be missing.

    Raises UnusableLog, which names `log`, if an event is damaged.
    """
    found: TrajectoryHistory | None = None
    received: list[LoggedEvent] | None = None  # in the present launch; None before the trajectory starts
    departures: list[LoggedEvent] = []  # before its start: a later lease may be on an engine that has left
    for event in events:
        message = decode_event(log, event).message
        match message:
            case RunStarted():
                received, departures = None, []
            case EngineLeft() | ExecutorLeft() if received is None:
                departures.append(LoggedEvent(event.time, message))
            case StartGroup() if received is None and _contains_trajectory(message, trajectory_id):
                received = departures
                found = TrajectoryHistory(trajectory_id, message, event.time, received)
            case StartGroup():  # another group, or a refused duplicate
                pass
            case GroupAborted() if not _contains_trajectory(message, trajectory_id):
                pass
            case _ if received is not None and getattr(message, "trajectory_id", None) in (None, trajectory_id):
                received.append(LoggedEvent(event.time, message))
            case _:
                pass
    return found


def _contains_trajectory(group: StartGroup | GroupAborted, trajectory_id: int) -> bool:
    return group.first_trajectory_id <= trajectory_id < group.first_trajectory_id + group.size
