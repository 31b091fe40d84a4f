"""The event log: what every decider received, before it decided, and a fingerprint of what it did.

One SQLite file a process, in WAL mode. A thread of its own commits in groups, so that the event loop never waits for a
disk, and tells how far it has come. A kill loses at most what it has not told of; no record is ever torn.
Reading is in bus.event_reading.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bus import retention
from bus.packing import pack, plain
from bus.retention import Retention

SCHEMA_VERSION = 3
BOUND = 200_000  # records that may wait for the thread; beyond it `full` tells the owner to hold its events back
_GROUP_S = 0.001  # a group is committed so long after its first record: what an event causes waits for it
_ROWS_AT_ONCE = (256, 32, 4, 1)

_SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY,
    time REAL NOT NULL,           -- seconds since the epoch, by the process's own clock that never goes back
    actor TEXT NOT NULL,
    sender TEXT NOT NULL,
    session INTEGER NOT NULL,     -- of the sender's process
    number INTEGER NOT NULL,      -- that the link gave it: bus.link
    kind TEXT NOT NULL,           -- the message's class
    trajectory INTEGER,           -- that it is about, where it is about one
    frame BLOB NOT NULL           -- the envelope as it arrived: bus.packing
);
CREATE INDEX IF NOT EXISTS events_trajectory ON events (trajectory) WHERE trajectory IS NOT NULL;
CREATE TABLE IF NOT EXISTS groups (
    seq INTEGER PRIMARY KEY,      -- of an event that is about several trajectories
    first INTEGER NOT NULL,       -- of them
    last INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS groups_first ON groups (first, last);
CREATE TABLE IF NOT EXISTS decisions (
    seq INTEGER PRIMARY KEY,      -- of the event
    effects BLOB NOT NULL,        -- fingerprint of the effects, in their order
    state BLOB                    -- fingerprint of the state afterwards, where the decider gives one
);
"""
    + retention.SCHEMA
)


class Event(NamedTuple):
    seq: int
    time: float
    actor: str
    sender: str
    session: int
    number: int
    kind: str
    trajectory: int | None
    frame: bytes


class Decision(NamedTuple):
    seq: int
    effects: bytes
    state: bytes | None


class Group(NamedTuple):
    """The trajectories of an event that is about several."""

    seq: int
    first: int
    last: int


Record = Event | Decision | Group


class EventLogFailure(Exception):
    """The log cannot be written: a full disk, a read-only folder. The run must stop: what is not logged is lost."""


class EventLog:
    """Appends from one thread; `close` commits all that was appended."""

    def __init__(self, path: Path, *, compress: bool = False, keep_steps: int = 0) -> None:
        """On the log's thread `compress` packs long frames, and what is older than `keep_steps` finished steps goes; 0
        keeps all."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = _open(path)
            self._retention = Retention(self._connection, keep_steps) if keep_steps else None
        except (OSError, sqlite3.Error) as error:
            raise EventLogFailure(f"{path}: {error}") from error
        self._path = path
        self.on_commit: Callable[[int], object] = lambda seq: (
            None
        )  # on the log's thread: the last event that is committed
        self._stored = pack if compress else plain
        self._last = int(self._connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0])
        self._committed = self._last
        self._records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._room = threading.Event()
        self._closing = threading.Event()
        self._failure: EventLogFailure | None = None
        self._thread = threading.Thread(target=self._write, name="event-log", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        return self._records.qsize() > BOUND

    def wait_for_room(self) -> None:
        """Blocks until the thread has caught up. Raises EventLogFailure if it cannot."""
        while self.full:
            self.check()
            self._room.clear()
            self._room.wait(timeout=1.0)

    def append(
        self,
        at: float,
        actor: str,
        sender: str,
        kind: str,
        about: int | range | None,
        frame: bytes,
        session: int = 0,
        number: int = 0,
    ) -> int:
        """`about`: the trajectory, or those, that the event is about. Returns the event's number.

        Raises EventLogFailure if an earlier record could not be written.
        """
        self.check()
        self._last += 1
        trajectory = about if isinstance(about, int) else None
        self._records.put(Event(self._last, at, actor, sender, session, number, kind, trajectory, frame))
        if isinstance(about, range) and about:
            self._records.put(Group(self._last, about[0], about[-1]))
        return self._last

    def decided(self, seq: int, effects: bytes, state: bytes | None) -> None:
        self._records.put(Decision(seq, effects, state))

    def close(self) -> None:
        self._records.put(None)
        self._closing.set()
        self._thread.join()
        self._connection.close()
        self.check()

    def check(self) -> None:
        """Raises EventLogFailure if a record could not be written; `on_commit` was called then."""
        if self._failure is not None:
            raise self._failure

    def _write(self) -> None:
        open_ = True
        while open_:
            group, open_ = self._next_group()
            try:
                self._commit(group)
            except Exception as error:  # the thread's edge: who waits for a commit has to hear of it
                self._failure = EventLogFailure(f"{self._path}: {error}")
                self._failure.__cause__ = error
                self.on_commit(self._committed)
                return
            finally:
                self._room.set()

    def _next_group(self) -> tuple[list[Record], bool]:
        """What arrives within one group's time, and whether more may come."""
        group: list[Record] = []
        record = self._records.get()
        self._closing.wait(_GROUP_S)  # to be woken for each record would take the event loop's time
        while record is not None:
            group.append(record)
            try:
                record = self._records.get_nowait()
            except queue.Empty:
                return group, True
        return group, False

    def _commit(self, group: list[Record]) -> None:
        events = [record for record in group if isinstance(record, Event)]
        rows = [(*event[:-1], self._stored(event.frame)) for event in events]
        with self._connection:
            _insert(self._connection, "events", rows)
            _insert(self._connection, "decisions", [record for record in group if isinstance(record, Decision)])
            _insert(self._connection, "groups", [record for record in group if isinstance(record, Group)])
            if self._retention is not None:
                self._retention.apply(self._connection, events)
        if events:
            self._committed = events[-1].seq
            self.on_commit(self._committed)


def _insert(connection: sqlite3.Connection, table: str, rows: Sequence[tuple[object, ...]]) -> None:
    """Many rows in each statement: every statement gives the interpreter away, and waits for its turn to get it back."""
    start = 0
    for count in _ROWS_AT_ONCE:
        while len(rows) - start >= count:
            chosen = rows[start : start + count]
            places = ", ".join(["(" + ", ".join("?" * len(chosen[0])) + ")"] * count)
            connection.execute(f"INSERT INTO {table} VALUES {places}", [value for row in chosen for value in row])
            start += count


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.executescript(_SCHEMA)
    with connection:
        connection.execute("INSERT OR IGNORE INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
    found = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()[0]
    if int(found) != SCHEMA_VERSION:
        raise sqlite3.DatabaseError(f"event log of schema version {found}, this program reads {SCHEMA_VERSION}")
    return connection
