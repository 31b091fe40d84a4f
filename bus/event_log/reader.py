"""Reads event logs, including logs of a running process."""

import sqlite3
import zlib
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from asterism.bus.codec import MalformedFrame, decode
from asterism.bus.event_log.compression import decompress_frame
from asterism.bus.event_log.records import SCHEMA_VERSION, Decision, Event, RemovedEvents, compute_checksum
from asterism.bus.messages import Envelope, Message
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import DamagedFile, check_file

KindT = TypeVar("KindT", bound=Message)
_COLUMNS = "e.seq, time, actor, sender, epoch, number, kind, trajectory, frame"
_IN_TRAJECTORY_OR_GROUP = (
    "e.seq IN (SELECT seq FROM events WHERE trajectory = ? UNION SELECT seq FROM groups WHERE first <= ? AND last >= ?)"
)


class UnusableLog(UnusableInput):
    """A file that cannot be read as an event log; the message names the file."""


def read_events(
    path: Path,
    *,
    trajectory: int | None = None,
    with_group: bool = False,
    kinds: Sequence[str] = (),
    actor: str | None = None,
    since_seq: int = 0,
    time_range: tuple[float, float] = (-inf, inf),
) -> Generator[tuple[Event, Decision | None]]:
    """Yield events in order, each with its decision, or with None if the process exited before the decision.

    Filters: the number is at least `since_seq`; the event concerns `trajectory` (or, with `with_group`, its
    group); its kind is in `kinds`; `actor` received it; its time is in the half-open `time_range`.
    Raises UnusableLog.
    """
    conditions: list[tuple[str, Sequence[Any]]] = [("e.seq >= ?", (since_seq,))]
    if trajectory is not None and with_group:
        conditions.append((_IN_TRAJECTORY_OR_GROUP, [trajectory] * 3))
    elif trajectory is not None:
        conditions.append(("trajectory = ?", (trajectory,)))
    if kinds:
        conditions.append((f"kind IN ({', '.join('?' * len(kinds))})", kinds))
    if actor is not None:
        conditions.append(("actor = ?", (actor,)))
    if time_range != (-inf, inf):
        conditions.append(("time >= ? AND time < ?", time_range))
    where = " AND ".join(condition for condition, _ in conditions)
    with _open_log(path) as connection:
        if _is_empty(path, connection):
            return
        if with_group:
            _check_groups(path, connection)
        yield from _select_events(path, connection, where, [each for _, values in conditions for each in values])


def _select_events(
    path: Path, connection: sqlite3.Connection, where: str, values: Sequence[Any]
) -> Generator[tuple[Event, Decision | None]]:
    columns = f"{_COLUMNS}, e.checksum, effects, state"
    query = f"SELECT {columns} FROM events e LEFT JOIN decisions d ON e.seq = d.seq WHERE {where} ORDER BY e.seq"
    for *row, found, effects, state in connection.execute(query, values):
        _check_row(path, row, found)
        decision = None if effects is None else Decision(row[0], effects, state)
        yield Event._make((*row[:8], _decompress(path, row[0], row[8]))), decision


def _check_row(log: Path, row: Sequence[Any], checksum: int) -> None:
    """Raise UnusableLog for a row that differs from its checksum."""
    if checksum != compute_checksum(row):
        raise UnusableLog(f"{log}: event {row[0]} is damaged: it differs from its checksum")


def _check_groups(log: Path, connection: sqlite3.Connection) -> None:
    for *row, checksum in connection.execute("SELECT seq, first, last, checksum FROM groups"):
        _check_row(log, row, checksum)


def decode_event(log: Path, event: Event) -> Envelope:
    """Return the event's envelope. Raises UnusableLog for a damaged frame."""
    try:
        return decode(event.frame)
    except MalformedFrame as error:
        raise UnusableLog(f"{log}: event {event.seq} is damaged: {error}") from error


def read_messages(log: Path, kind: type[KindT], **filters: Any) -> Generator[tuple[Event, KindT]]:
    """Yield the events of one kind with their messages; `filters` are those of read_events. Raises UnusableLog."""
    for event, _ in read_events(log, kinds=[kind.__name__], **filters):
        message = decode_event(log, event).message
        assert isinstance(message, kind)
        yield event, message


def _decompress(log: Path, seq: int, stored: bytes) -> bytes:
    try:
        return decompress_frame(stored)
    except zlib.error as error:
        raise UnusableLog(f"{log}: event {seq} is damaged: {error}") from error


def read_first_time(path: Path) -> float | None:
    """Return the time of the first event; None for an empty log."""
    return _select_value(path, "SELECT time FROM events ORDER BY seq LIMIT 1")


def read_last_seq(path: Path) -> int:
    """Return the number of the last event; 0 for an empty log."""
    return _select_value(path, "SELECT max(seq) FROM events") or 0


def find_epoch_start(path: Path, epoch: int) -> int | None:
    """Return the number of the process's RunStarted in this epoch, or None."""
    query = "SELECT min(seq) FROM events WHERE kind = 'RunStarted' AND epoch = ?"
    return _select_value(path, query, epoch) if path.exists() else None


def _select_value(path: Path, query: str, *values: int) -> Any:
    """Return the first column of the first row; None without a row."""
    with _open_log(path) as connection:
        row = None if _is_empty(path, connection) else connection.execute(query, values).fetchone()
        return None if row is None else row[0]


def list_removed_events(path: Path) -> list[RemovedEvents]:
    with _open_log(path) as connection:
        if _is_empty(path, connection):
            return []
        return [RemovedEvents(*row) for row in connection.execute("SELECT * FROM gone ORDER BY first, kind")]


def check_complete(path: Path, since_seq: int) -> None:
    """Raise UnusableLog if an event from `since_seq` on was removed."""
    last = max((removed.last for removed in list_removed_events(path)), default=0)
    if last >= since_seq:
        raise UnusableLog(
            f"{path}: log.keep_steps has removed events up to number {last}; events from number {since_seq} on are needed"
        )


@contextmanager
def _open_log(path: Path) -> Generator[sqlite3.Connection]:
    """Open a log for reading. Raises UnusableLog for a damaged file."""
    try:
        for name in (path, path.with_name(f"{path.name}-wal")):
            if name.exists():
                check_file(name)
    except DamagedFile as error:
        raise UnusableLog(str(error)) from None
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise UnusableLog(f"{path}: cannot be read as an event log: {error}") from error


def _is_empty(path: Path, connection: sqlite3.Connection) -> bool:
    """Return whether the log has no tables yet. Raises UnusableLog for another schema version."""
    if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return True
    found = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    if found is not None and found[0] != str(SCHEMA_VERSION):
        raise UnusableLog(
            f"{path}: event log of schema version {found[0]}, this program reads {SCHEMA_VERSION}; read it with the "
            "version of Asterism that wrote it"
        )
    return found is None
