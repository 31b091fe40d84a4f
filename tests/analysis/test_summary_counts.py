"""The summary's trajectories are those of the event logs, and those whose events are not kept any more."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from analysis.summary import count_trajectories
from configs.run_folder import RunFolder
from tests.recorded import small_run


def test_trajectories_whose_events_are_gone_count_in_their_life(tmp_path: Path) -> None:
    folder = small_run(RunFolder(tmp_path / "run"))
    before = count_trajectories(folder)
    with contextlib.closing(sqlite3.connect(folder.events / "head.sqlite")) as log, log:
        query = "SELECT min(seq) FROM events WHERE kind = 'TrajectoryFinished'"
        (seq,) = log.execute(query).fetchone()
        log.execute("DELETE FROM events WHERE seq = ?", (seq,))
        log.execute("INSERT INTO gone VALUES (?, ?, 'TrajectoryFinished', 1)", (seq, seq))
    assert before["trajectories_started"] == before["trajectories_finished"] == 2
    assert count_trajectories(folder) == before
