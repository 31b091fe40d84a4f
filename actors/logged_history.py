"""A trajectory's history, from the event logs of a run's folder."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from actors.wiring import HEAD
from bus.event_log import Event
from bus.event_reading import envelope_of, read_events
from bus.messages import EngineLeft, ExecutorLeft, GroupAborted, RunStarted, StartGroup
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from policies.history import End, Heard, History

_COMMON = ("RunStarted", "StartGroup", "GroupAborted", "ExecutorLeft", "EngineLeft")  # what concerns more than one

_ENDS = tuple(kind.__name__ for kind in get_args(End))


def history_of(folder: RunFolder, trajectory_id: int) -> History:
    """Of the trajectory that had this number last: a run that was resumed gives numbers again. Raises UnusableInput."""
    logs = sorted(folder.events.glob("rollout-*.sqlite"))
    if not logs:
        raise UnusableInput(
            f"{folder.events}: there is no event log of a rollout process; was the run started with log.events = false?"
        )
    histories = [found for log in logs if (found := _history_in(log, trajectory_id)) is not None]
    if not histories:
        raise UnusableInput(f"{folder.events}: no log knows trajectory {trajectory_id}")
    return max(histories, key=lambda history: history.began)


def end_heard(folder: RunFolder, history: History) -> End | None:
    """How the head heard that the trajectory ended: also of one that was lost, of which its own log may not tell the end."""
    log = folder.events / f"{HEAD}.sqlite"
    if not log.exists():
        return None
    heard = (event for event, _ in read_events(log, trajectory=history.trajectory_id, kinds=_ENDS))
    ends = [
        envelope_of(log, event).message for event in heard if event.actor == "buffer" and event.time >= history.began
    ]
    end = ends[-1] if ends else None
    assert end is None or isinstance(end, End)
    return end


def _history_in(log: Path, trajectory_id: int) -> History | None:
    common = (event for event, _ in read_events(log, kinds=_COMMON))
    own = (event for event, _ in read_events(log, trajectory=trajectory_id))
    return told_of(heapq.merge(common, own, key=lambda event: event.seq), trajectory_id, log)


def told_of(events: Iterable[Event], trajectory_id: int, log: Path) -> History | None:
    """What `events`, in their order, tell of the trajectory; they may leave out what is of others alone.

    Raises UnusableLog, which names `log`, where one of them is damaged.
    """
    found: History | None = None
    heard: list[Heard] | None = None  # in the present life of the process; None before it has the trajectory
    left: list[Heard] = []  # before that: a lease may be granted on an engine that has left
    for event in events:
        message = envelope_of(log, event).message
        match message:
            case RunStarted():
                heard, left = None, []
            case EngineLeft() | ExecutorLeft() if heard is None:
                left.append(Heard(event.time, message))
            case StartGroup() if heard is None and _is_among(message, trajectory_id):
                heard = left
                found = History(trajectory_id, message, event.time, heard)
            case StartGroup():  # another one, or the same again, which was refused
                pass
            case GroupAborted() if not _is_among(message, trajectory_id):
                pass
            case _ if heard is not None and getattr(message, "trajectory_id", None) in (None, trajectory_id):
                heard.append(Heard(event.time, message))
            case _:
                pass
    return found


def _is_among(group: StartGroup | GroupAborted, trajectory_id: int) -> bool:
    return group.first_trajectory_id <= trajectory_id < group.first_trajectory_id + group.size
