"""Reading event logs, also of a run that goes on."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from bus.event_log import Decision, Event


def read_events(
    path: Path, *, trajectory: int | None = None, kinds: Sequence[str] = (), since: int = 0
) -> Iterator[tuple[Event, Decision | None]]:
    """Every event from number `since` on, in order, with what was decided on it, if its decider lived to decide.

    `trajectory` and `kinds` choose among them.
    """
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    chosen = ["e.seq >= ?"]
    chosen += ["trajectory = ?"] if trajectory is not None else []
    chosen += [f"kind IN ({', '.join('?' * len(kinds))})"] if kinds else []
    values = [since, *([trajectory] if trajectory is not None else []), *kinds]
    try:
        query = (
            "SELECT e.seq, time, actor, sender, session, number, kind, trajectory, frame, effects, state FROM events e "
            f"LEFT JOIN decisions d ON e.seq = d.seq WHERE {' AND '.join(chosen)} ORDER BY e.seq"
        )
        for row in connection.execute(query, values):
            decision = None if row[9] is None else Decision(row[0], row[9], row[10])
            yield Event(*row[:9]), decision
    finally:
        connection.close()


def first_of_session(path: Path, session: int) -> int | None:
    """Number of the event with which the process began in this session of its own; None if there is none."""
    if not path.exists():
        return None
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        query = "SELECT min(seq) FROM events WHERE kind = 'RunStarted' AND session = ?"
        return connection.execute(query, (session,)).fetchone()[0]
    finally:
        connection.close()
