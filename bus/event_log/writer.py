"""Writes the event log of a process: each event before the decider decides on it, and a fingerprint of the decision.

The log is one SQLite file per process, in WAL mode. A writer thread commits in groups, so that the event
loop never waits for the disk, and reports each commit. A kill loses only records of unreported
commits; no record is torn.
"""

import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from asterism.bus.event_log.compression import compress_frame, store_uncompressed
from asterism.bus.event_log.records import (
    SCHEMA,
    SCHEMA_VERSION,
    Decision,
    Event,
    Record,
    TrajectoryRange,
    compute_checksum,
)
from asterism.bus.event_log.retention import Retention

MAX_QUEUED_RECORDS = 200_000  # beyond this bound, `is_full` is true, and the owner stops receiving
_GROUP_COMMIT_S = 0.001  # time from a group's first record to its commit; an event's effects wait for the commit
_INSERT_BATCH_SIZES = (256, 32, 4, 1)


class EventLogFailure(Exception):
    """The log cannot be written, for example on a full disk; unlogged events are lost."""


class EventLog:
    """An event log for appends from one thread; `close` commits everything that was appended."""

    def __init__(self, path: Path, *, compress: bool = False, keep_steps: int = 0) -> None:
        """Open the log. `compress` applies to long frames; `keep_steps` finished steps keep their events, 0: all."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = _open(path)
            self._retention = Retention(self._connection, keep_steps) if keep_steps else None
        except (OSError, sqlite3.Error) as error:
            raise EventLogFailure(f"{path}: {error}") from error
        self._path = path
        # Called on the writer thread with the number of the last committed event.
        self.on_commit: Callable[[int], object] = lambda seq: None
        self._encode_frame = compress_frame if compress else store_uncompressed
        self._last_seq = int(self._connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0])
        self._committed_seq = self._last_seq
        self._records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._space_available = threading.Event()
        self._closing = threading.Event()
        self._failure: EventLogFailure | None = None
        self._thread = threading.Thread(target=self._write, name="event-log", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        return self._records.qsize() > MAX_QUEUED_RECORDS

    def wait_for_space(self) -> None:
        """Block until the writer thread has caught up. Raises EventLogFailure after a failed write."""
        while self.is_full:
            self.raise_if_failed()
            self._space_available.clear()
            self._space_available.wait(timeout=1.0)

    def append(
        self,
        time: float,
        actor: str,
        sender: str,
        kind: str,
        trajectories: int | range | None,
        frame: bytes,
        epoch: int = 0,
        number: int = 0,
    ) -> int:
        """Append an event and return its number. Raises EventLogFailure if an earlier write failed."""
        self.raise_if_failed()
        self._last_seq += 1
        trajectory = trajectories if isinstance(trajectories, int) else None
        self._records.put(Event(self._last_seq, float(time), actor, sender, epoch, number, kind, trajectory, frame))
        if isinstance(trajectories, range) and trajectories:
            self._records.put(TrajectoryRange(self._last_seq, trajectories[0], trajectories[-1]))
        return self._last_seq

    def append_decision(self, seq: int, effects: bytes, state: bytes | None) -> None:
        self._records.put(Decision(seq, effects, state))

    def close(self) -> None:
        self._records.put(None)
        self._closing.set()
        self._thread.join()
        self._connection.close()
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise EventLogFailure after a failed write, which also calls `on_commit`."""
        if self._failure is not None:
            raise self._failure

    def _write(self) -> None:
        is_open = True
        while is_open:
            group, is_open = self._collect_group()
            try:
                self._commit(group)
            except Exception as error:  # the thread's outermost level: waiters for a commit must get the error
                self._failure = EventLogFailure(f"{self._path}: {error}")
                self._failure.__cause__ = error
                self.on_commit(self._committed_seq)
                return
            finally:
                self._space_available.set()

    def _collect_group(self) -> tuple[list[Record], bool]:
        """Return the records that arrive within one group's time, and whether the log is still open."""
        group: list[Record] = []
        record = self._records.get()
        self._closing.wait(_GROUP_COMMIT_S)  # a wake-up for each record would cost the event loop time
        while record is not None:
            group.append(record)
            try:
                record = self._records.get_nowait()
            except queue.Empty:
                return group, True
        return group, False

    def _commit(self, group: list[Record]) -> None:
        events = [record for record in group if isinstance(record, Event)]
        rows = [_add_checksum((*event[:-1], self._encode_frame(event.frame))) for event in events]
        ranges = [_add_checksum(record) for record in group if isinstance(record, TrajectoryRange)]
        with self._connection:
            _insert(self._connection, "events", rows)
            _insert(self._connection, "decisions", [record for record in group if isinstance(record, Decision)])
            _insert(self._connection, "groups", ranges)
            if self._retention is not None:
                self._retention.apply(self._connection, events)
        if events:
            self._committed_seq = events[-1].seq
            self.on_commit(self._committed_seq)


def _add_checksum(row: tuple[object, ...]) -> tuple[object, ...]:
    return (*row, compute_checksum(row))


def _insert(connection: sqlite3.Connection, table: str, rows: Sequence[tuple[object, ...]]) -> None:
    """Insert many rows per statement: each statement releases the GIL and reacquires it."""
    start = 0
    for count in _INSERT_BATCH_SIZES:
        while len(rows) - start >= count:
            batch = rows[start : start + count]
            places = ", ".join(["(" + ", ".join("?" * len(batch[0])) + ")"] * count)
            connection.execute(f"INSERT INTO {table} VALUES {places}", [value for row in batch for value in row])
            start += count


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.executescript(SCHEMA)
    with connection:
        connection.execute("INSERT OR IGNORE INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
    found = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()[0]
    if found != str(SCHEMA_VERSION):
        raise sqlite3.DatabaseError(f"event log of schema version {found}, this program reads {SCHEMA_VERSION}")
    return connection
