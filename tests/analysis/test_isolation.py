"""What held the model's code in a run, told of all its executors."""

from __future__ import annotations

import json
from pathlib import Path

from analysis.summary import isolation_in_force, isolation_of
from configs.run_folder import RunFolder

WALLS = {"namespaces": True, "seccomp": True, "landlock": 4, "missing": []}


def started(folder: RunFolder, executor: str, **isolation: object) -> None:
    folder.logs.mkdir(exist_ok=True)
    with (folder.logs / f"{executor}.jsonl").open("a") as log:
        log.write(json.dumps({"event": "sandbox.started", **WALLS, **isolation}) + "\n")


def test_executors_that_are_alike_are_told_as_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert isolation_in_force(folder) is None
    for executor in ("executor-0", "executor-0@1"):
        started(folder, executor, backend="docker")
    assert isolation_in_force(folder) == {"backend": "docker", **WALLS}


def test_what_one_of_them_lacks_counts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    started(folder, "executor-0", backend="docker")
    started(folder, "executor-0@1", backend="docker")
    started(folder, "executor-0@1", backend="process", namespaces=False, landlock=0, missing=["No namespaces."])
    whole = {"backend": "docker, process", "namespaces": False, "seccomp": True, "landlock": 0}
    assert isolation_in_force(folder) == {**whole, "missing": ["No namespaces."]}
    assert isolation_of(folder, "executor-0") == {"backend": "docker", **WALLS}
