"""The summary of a run: the weakest isolation, and counts of trajectories."""

import json
from pathlib import Path

from asterism.analysis.summary import count_trajectories, read_isolation, read_weakest_isolation
from asterism.configs.run_folder import RunFolder
from tests.edited_logs import editing_log
from tests.recorded import small_run

LAYERS = {"namespaces": True, "seccomp": True, "landlock": 4, "missing": []}


def log_start(folder: RunFolder, executor: str, **isolation: object) -> None:
    folder.logs.mkdir(exist_ok=True)
    with (folder.logs / f"{executor}.jsonl").open("a") as log:
        log.write(json.dumps({"event": "sandbox.started", **LAYERS, **isolation}) + "\n")


def test_equal_executors_share_one_entry(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_weakest_isolation(folder) is None
    for executor in ("executor-0", "executor-0@1"):
        log_start(folder, executor, backend="docker")
    assert read_weakest_isolation(folder) == {"backend": "docker", **LAYERS}


def test_an_isolation_layer_counts_as_missing_if_one_executor_lacks_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    log_start(folder, "executor-0", backend="docker")
    log_start(folder, "executor-0@1", backend="docker")
    log_start(folder, "executor-0@1", backend="process", namespaces=False, landlock=0, missing=["No namespaces."])
    whole = {"backend": "docker, process", "namespaces": False, "seccomp": True, "landlock": 0}
    assert read_weakest_isolation(folder) == {**whole, "missing": ["No namespaces."]}
    assert read_isolation(folder, "executor-0") == {"backend": "docker", **LAYERS}


def test_trajectories_with_removed_events_are_counted(tmp_path: Path) -> None:
    folder = small_run(RunFolder(tmp_path / "run"))
    before = count_trajectories(folder)
    with editing_log(folder.events / "head.sqlite") as log:
        query = "SELECT min(seq) FROM events WHERE kind = 'TrajectoryFinished'"
        (seq,) = log.execute(query).fetchone()
        log.execute("DELETE FROM events WHERE seq = ?", (seq,))
        log.execute("INSERT INTO gone VALUES (?, ?, 'TrajectoryFinished', 1)", (seq, seq))
    assert before["trajectories_started"] == before["trajectories_finished"] == 2
    assert count_trajectories(folder) == before
