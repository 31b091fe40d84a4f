"""How long events are kept: those of the last finished steps (`log.keep_steps`), and what is told a few times in a step.

A process knows how many steps are finished from what it receives: the head from StepTrained, a rollout process from the
version that generated a turn. Older events go in small chunks with each commit, so that none takes long; their room in
the file is used again. Kept for good are those events that a resumed run and the summary need, and how many of each other
kind are gone.

A decider is a function of all events since its RunStarted. With some of them gone it can neither be replayed nor be rebuilt
after a kill; bus.event_reading.missing tells.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bus.codec import decode
from bus.messages import StepTrained, TurnGenerated

if TYPE_CHECKING:
    from bus.event_log import Event

CHUNK = 200  # events that one commit looks at
KEPT = (
    *("RunStarted", "StartGroup", "StepRequested", "StepCollected", "StepTrained", "LengthsMeasured"),
    *("EvaluationRequested", "EvaluationFinished", "WeightsPublished", "WeightsLoaded"),
    *("EngineJoined", "EngineLeft", "ExecutorJoined", "ExecutorLeft"),
)
_TELLS_STEPS = (StepTrained.__name__, TurnGenerated.__name__)
_OLD = f"seq >= ? AND seq < ? AND kind NOT IN ({', '.join(repr(kind) for kind in KEPT)})"

SCHEMA = """
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY,     -- that was finished: where events are not kept for ever
    seq INTEGER NOT NULL          -- of the event that told it first
);
CREATE TABLE IF NOT EXISTS gone (
    first INTEGER NOT NULL,       -- between these two numbers
    last INTEGER NOT NULL,
    kind TEXT NOT NULL,
    events INTEGER NOT NULL,      -- so many are gone
    PRIMARY KEY (first, kind)
);
"""


class Retention:
    """Of one log. Works in the log's transactions, on its thread."""

    def __init__(self, connection: sqlite3.Connection, keep_steps: int) -> None:
        self._keep_steps = keep_steps
        self._finished = int(connection.execute("SELECT coalesce(max(step), -1) FROM steps").fetchone()[0])
        self._at = 1 + int(connection.execute("SELECT coalesce(max(last), 0) FROM gone").fetchone()[0])
        self._horizon = self._at
        self._move_horizon(connection)

    def apply(self, connection: sqlite3.Connection, events: Sequence[Event]) -> None:
        """After these were added."""
        told = next((event for event in reversed(events) if event.kind in _TELLS_STEPS), None)
        finished = -1 if told is None else _steps_finished(told)
        if told is not None and finished > self._finished:
            self._finished = finished
            connection.execute("INSERT OR IGNORE INTO steps VALUES (?, ?)", (finished, told.seq))
            self._move_horizon(connection)
        if self._at < self._horizon:
            self._drop(connection)

    def _move_horizon(self, connection: sqlite3.Connection) -> None:
        query = "SELECT coalesce(max(seq), 0) FROM steps WHERE step <= ?"
        seq = int(connection.execute(query, (self._finished - self._keep_steps,)).fetchone()[0])
        self._horizon = max(self._horizon, seq)

    def _drop(self, connection: sqlite3.Connection) -> None:
        """One chunk, which lies within one life of the run."""
        next_life = "SELECT coalesce(min(seq), ?) FROM events WHERE seq > ? AND seq < ? AND kind = 'RunStarted'"
        end = min(self._at + CHUNK, self._horizon)
        (end,) = connection.execute(next_life, (end, self._at, end)).fetchone()
        old = self._at, end
        count = f"INSERT INTO gone SELECT ?, ?, kind, count(*) FROM events WHERE {_OLD} GROUP BY kind"
        connection.execute(count, (self._at, end - 1, *old))
        connection.execute(f"DELETE FROM decisions WHERE seq IN (SELECT seq FROM events WHERE {_OLD})", old)
        connection.execute(f"DELETE FROM groups WHERE seq IN (SELECT seq FROM events WHERE {_OLD})", old)
        connection.execute(f"DELETE FROM events WHERE {_OLD}", old)
        self._at = end


def _steps_finished(event: Event) -> int:
    """Known by the event; -1 where it does not tell."""
    message = decode(event.frame).message
    if isinstance(message, StepTrained):
        return message.step
    if isinstance(message, TurnGenerated) and message.versions:
        return int.from_bytes(message.versions[-4:], "little", signed=True)
    return -1
