"""The events of all processes of a run, merged by time, and those chosen that somebody asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from heapq import merge
from math import inf, isfinite
from pathlib import Path
from typing import NamedTuple

import msgspec

from bus.event_log import Decision, Event
from bus.event_reading import envelope_of, first_time, read_events
from bus.messages import Envelope
from configs.errors import UnusableInput
from configs.run_folder import RunFolder


class Logged(NamedTuple):
    """An event and the log of the process that received it."""

    log: Path
    event: Event
    decision: Decision | None

    @property
    def process(self) -> str:
        return self.log.stem

    @property
    def name(self) -> str:
        return f"{self.process}:{self.event.seq}"

    @property
    def envelope(self) -> Envelope:
        """Raises UnusableInput where it is damaged."""
        return envelope_of(self.log, self.event)


class Choice(msgspec.Struct, frozen=True):
    """Which events; those that all of it holds for."""

    actor: str | None = None
    kinds: tuple[str, ...] = ()
    trajectory: int | None = None  # about it, or about its whole group
    since: float = -inf  # seconds since the epoch
    until: float = inf


EVERYTHING = Choice()


def merged(folder: RunFolder, choice: Choice = EVERYTHING, after: Mapping[str, int] = {}) -> Iterator[Logged]:
    """In the order of time; of each process those behind a number in `after`. Raises UnusableInput if there is no log."""
    paths = sorted(folder.events.glob("*.sqlite"))
    if not paths:
        raise UnusableInput(f"{folder.events}: there are no event logs; was the run started with log.events = false?")
    logs = (_chosen(path, choice, after.get(path.stem, 0)) for path in paths)
    return merge(*logs, key=lambda logged: (logged.event.time, logged.process, logged.event.seq))


def _chosen(log: Path, choice: Choice, after: int) -> Iterator[Logged]:
    events = read_events(
        log,
        trajectory=choice.trajectory,
        with_group=True,
        kinds=choice.kinds,
        actor=choice.actor,
        since=after + 1,
        times=(choice.since, choice.until),
    )
    for event, decision in events:
        yield Logged(log, event, decision)


def began_at(folder: RunFolder) -> float:
    """When the first event of any process was logged; 0 while there is none."""
    times = (first_time(path) for path in folder.events.glob("*.sqlite"))
    return min((time for time in times if time is not None), default=0.0)


def moment(text: str, began: float, flag: str) -> float:
    """Seconds since the epoch, of seconds since the run began or of a date and time. Raises UnusableInput."""
    try:
        seconds = float(text)
        if isfinite(seconds):
            return began + seconds
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UnusableInput(
            f"{flag} {text}: this is no time: give seconds since the run began, such as 12.5, or 2026-01-31T12:00:00"
        ) from None
