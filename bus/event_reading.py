"""Reading event logs, also of a run that goes on."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from bus.codec import MalformedFrame, decode
from bus.event_log import SCHEMA_VERSION, Decision, Event
from bus.messages import Envelope
from bus.packing import unpack
from configs.errors import UnusableInput

_COLUMNS = "e.seq, time, actor, sender, session, number, kind, trajectory, frame, effects, state"


class UnusableLog(UnusableInput):
    """A file that this program cannot read as an event log; the message names it."""


def read_events(
    path: Path,
    *,
    trajectory: int | None = None,
    with_group: bool = False,
    kinds: Sequence[str] = (),
    actor: str | None = None,
    since: int = 0,
    times: tuple[float, float] = (-inf, inf),
) -> Generator[tuple[Event, Decision | None]]:
    """Every event from number `since` on, in order, with what was decided on it, if its decider lived to decide.

    The others choose among them: those about a trajectory, and with its group those about that; those of some kinds;
    those that an actor received; those of times from the first to before the second. Raises UnusableLog.
    """
    chosen: list[str] = ["e.seq >= ?"]
    values: list[Any] = [since]
    if trajectory is not None and with_group:
        chosen.append(
            "e.seq IN (SELECT seq FROM events WHERE trajectory = ? "
            "UNION SELECT seq FROM groups WHERE first <= ? AND last >= ?)"
        )
        values += [trajectory] * 3
    elif trajectory is not None:
        chosen.append("trajectory = ?")
        values.append(trajectory)
    if kinds:
        chosen.append(f"kind IN ({', '.join('?' * len(kinds))})")
        values += kinds
    if actor is not None:
        chosen.append("actor = ?")
        values.append(actor)
    if times != (-inf, inf):
        chosen.append("time >= ? AND time < ?")
        values += times
    query = f"SELECT {_COLUMNS} FROM events e LEFT JOIN decisions d ON e.seq = d.seq WHERE {' AND '.join(chosen)}"
    with _reading(path) as connection:
        if _is_empty(path, connection):
            return
        for row in connection.execute(f"{query} ORDER BY e.seq", values):
            decision = None if row[9] is None else Decision(row[0], row[9], row[10])
            yield Event(*row[:9])._replace(frame=_unpacked(path, row[0], row[8])), decision


def envelope_of(log: Path, event: Event) -> Envelope:
    """What was logged. Raises UnusableLog where the file's bytes are no longer those that were written."""
    try:
        return decode(event.frame)
    except MalformedFrame as error:
        raise UnusableLog(f"{log}: event {event.seq} is damaged: {error}") from error


def _unpacked(log: Path, seq: int, stored: bytes) -> bytes:
    try:
        return unpack(stored)
    except zlib.error as error:
        raise UnusableLog(f"{log}: event {seq} is damaged: {error}") from error


def first_time(path: Path) -> float | None:
    """Of the log's first event; None if there is none."""
    with _reading(path) as connection:
        if _is_empty(path, connection):
            return None
        row = connection.execute("SELECT time FROM events ORDER BY seq LIMIT 1").fetchone()
        return None if row is None else row[0]


def first_of_session(path: Path, session: int) -> int | None:
    """Number of the event with which the process began in this session of its own; None if there is none."""
    if not path.exists():
        return None
    with _reading(path) as connection:
        if _is_empty(path, connection):
            return None
        query = "SELECT min(seq) FROM events WHERE kind = 'RunStarted' AND session = ?"
        return connection.execute(query, (session,)).fetchone()[0]


class Gone(NamedTuple):
    """Events that are not kept any more: bus.retention."""

    first: int  # their numbers lie between these
    last: int
    kind: str
    events: int


def missing(path: Path) -> list[Gone]:
    """Empty where all is kept."""
    with _reading(path) as connection:
        if _is_empty(path, connection):
            return []
        return [Gone(*row) for row in connection.execute("SELECT * FROM gone ORDER BY first, kind")]


def check_whole(path: Path, since: int) -> None:
    """Raises UnusableLog where an event from number `since` on is gone: then no decider can be rebuilt from there."""
    last = max((each.last for each in missing(path)), default=0)
    if last >= since:
        raise UnusableLog(
            f"{path}: log.keep_steps has removed events up to number {last}; those since {since} are needed"
        )


@contextmanager
def _reading(path: Path) -> Generator[sqlite3.Connection]:
    """Raises UnusableLog where the file is damaged."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise UnusableLog(f"{path}: cannot be read as an event log: {error}") from error


def _is_empty(path: Path, connection: sqlite3.Connection) -> bool:
    """Whether its process has not come to making its tables yet. Raises UnusableLog if they are another version's."""
    if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return True
    found = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    if found is not None and int(found[0]) != SCHEMA_VERSION:
        raise UnusableLog(f"{path}: event log of schema version {found[0]}, this program reads {SCHEMA_VERSION}")
    return found is None
