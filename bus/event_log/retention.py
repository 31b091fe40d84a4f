"""Removal of old events: with `log.keep_steps`, a log keeps the events of the last finished steps.

The head reads the number of finished steps from StepTrained, a rollout process from the version that
generated a turn. Each commit removes one small chunk of older events; SQLite reuses the space. Events
of PERMANENT_KINDS, which a resumed run and the summary need, stay. Removed events are counted by kind.

A decider's state depends on all events since its RunStarted. A log that lacks some of these events allows neither
replay nor recovery; asterism.bus.event_log.reader.check_complete refuses it.
"""

import sqlite3
from collections.abc import Sequence

from asterism.bus.codec import decode
from asterism.bus.event_log.records import Event
from asterism.bus.messages import StepTrained, TurnGenerated

CHUNK_EVENTS = 200  # events that one commit scans
PERMANENT_KINDS = (
    *("RunStarted", "StartGroup", "StepRequested", "StepCollected", "StepTrained", "LengthsMeasured"),
    *("EvaluationRequested", "EvaluationFinished", "WeightsPublished", "WeightsLoaded"),
    *("EngineJoined", "EngineLeft", "ExecutorJoined", "ExecutorLeft"),
)
_STEP_KINDS = (StepTrained.__name__, TurnGenerated.__name__)
_REMOVABLE = f"seq >= ? AND seq < ? AND kind NOT IN ({', '.join(repr(kind) for kind in PERMANENT_KINDS)})"


class Retention:
    """Removes old events of one log, within the log's transactions and on its thread."""

    def __init__(self, connection: sqlite3.Connection, keep_steps: int) -> None:
        self._keep_steps = keep_steps
        self._last_finished_step = int(connection.execute("SELECT coalesce(max(step), -1) FROM steps").fetchone()[0])
        self._next_seq = 1 + int(connection.execute("SELECT coalesce(max(last), 0) FROM gone").fetchone()[0])
        self._horizon = self._next_seq
        self._move_horizon(connection)

    def apply(self, connection: sqlite3.Connection, events: Sequence[Event]) -> None:
        """Record finished steps and remove old events, after `events` were inserted."""
        step_event = next((event for event in reversed(events) if event.kind in _STEP_KINDS), None)
        finished = -1 if step_event is None else _read_finished_step(step_event)
        if step_event is not None and finished > self._last_finished_step:
            self._last_finished_step = finished
            connection.execute("INSERT OR IGNORE INTO steps VALUES (?, ?)", (finished, step_event.seq))
            self._move_horizon(connection)
        if self._next_seq < self._horizon:
            self._remove_chunk(connection)

    def _move_horizon(self, connection: sqlite3.Connection) -> None:
        query = "SELECT coalesce(max(seq), 0) FROM steps WHERE step <= ?"
        seq = int(connection.execute(query, (self._last_finished_step - self._keep_steps,)).fetchone()[0])
        self._horizon = max(self._horizon, seq)

    def _remove_chunk(self, connection: sqlite3.Connection) -> None:
        """Remove one chunk, which never spans two launches of the run."""
        next_launch = "SELECT coalesce(min(seq), ?) FROM events WHERE seq > ? AND seq < ? AND kind = 'RunStarted'"
        end = min(self._next_seq + CHUNK_EVENTS, self._horizon)
        (end,) = connection.execute(next_launch, (end, self._next_seq, end)).fetchone()
        chunk = self._next_seq, end
        count = f"INSERT INTO gone SELECT ?, ?, kind, count(*) FROM events WHERE {_REMOVABLE} GROUP BY kind"
        connection.execute(count, (self._next_seq, end - 1, *chunk))
        connection.execute(f"DELETE FROM decisions WHERE seq IN (SELECT seq FROM events WHERE {_REMOVABLE})", chunk)
        connection.execute(f"DELETE FROM groups WHERE seq IN (SELECT seq FROM events WHERE {_REMOVABLE})", chunk)
        connection.execute(f"DELETE FROM events WHERE {_REMOVABLE}", chunk)
        self._next_seq = end


def _read_finished_step(event: Event) -> int:
    """Return the last finished step; -1 if the event does not contain it."""
    message = decode(event.frame).message
    if isinstance(message, StepTrained):
        return message.step
    if isinstance(message, TurnGenerated) and message.versions:
        return int.from_bytes(message.versions[-4:], "little", signed=True)
    return -1
