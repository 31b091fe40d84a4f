"""Reads the events of all processes of a run, filtered and merged by time."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from heapq import merge
from math import inf, isfinite
from pathlib import Path
from typing import NamedTuple

import msgspec

from asterism.bus.event_log.reader import decode_event, read_events, read_first_time
from asterism.bus.event_log.records import Decision, Event
from asterism.bus.messages import Envelope
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder


class MergedEvent(NamedTuple):
    """An event and the log of the process that received it."""

    log_path: Path
    event: Event
    decision: Decision | None

    @property
    def process(self) -> str:
        return self.log_path.stem

    @property
    def name(self) -> str:
        return f"{self.process}:{self.event.seq}"

    @property
    def envelope(self) -> Envelope:
        """The decoded event. Raises UnusableInput if the event is damaged."""
        return decode_event(self.log_path, self.event)


class EventFilter(msgspec.Struct, frozen=True):
    """A filter that selects the events that match all of its fields."""

    actor: str | None = None
    kinds: tuple[str, ...] = ()
    trajectory: int | None = None  # events of the trajectory and of its group
    since: float = -inf  # seconds since the epoch
    until: float = inf


ALL_EVENTS = EventFilter()


def merge_events(
    folder: RunFolder, event_filter: EventFilter = ALL_EVENTS, after_seq: Mapping[str, int] = {}
) -> Iterator[MergedEvent]:
    """Yield events in order of time, after `after_seq` of each process. Raises UnusableInput if there is no log."""
    paths = sorted(folder.events.glob("*.sqlite"))
    if not paths:
        raise UnusableInput(f"{folder.events}: no event logs; the run may have had log.events = false")
    logs = (_read_filtered(path, event_filter, after_seq.get(path.stem, 0)) for path in paths)
    return merge(*logs, key=lambda logged: (logged.event.time, logged.process, logged.event.seq))


def _read_filtered(log_path: Path, event_filter: EventFilter, after_seq: int) -> Iterator[MergedEvent]:
    events = read_events(
        log_path,
        trajectory=event_filter.trajectory,
        with_group=True,
        kinds=event_filter.kinds,
        actor=event_filter.actor,
        since_seq=after_seq + 1,
        time_range=(event_filter.since, event_filter.until),
    )
    for event, decision in events:
        yield MergedEvent(log_path, event, decision)


def read_start_time(folder: RunFolder) -> float:
    """Return the time of the first event of any process, in seconds since the epoch, or 0 without events."""
    times = (read_first_time(path) for path in folder.events.glob("*.sqlite"))
    return min((time for time in times if time is not None), default=0.0)


def parse_time(text: str, start_time: float, flag: str) -> float:
    """Return seconds since the epoch, from a date or from seconds since the run's start. Raises UnusableInput."""
    try:
        seconds = float(text)
        if isfinite(seconds):
            return start_time + seconds
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UnusableInput(
            f"{flag} {text}: not a valid time; use seconds since the run's start, such as 12.5, or 2026-01-31T12:00:00"
        ) from None
