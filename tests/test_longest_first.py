"""The order of test files under pytest-xdist, and the record of their durations."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import longest_first
from tests.longest_first import (
    DURATIONS,
    Recorder,
    order_files,
    pytest_collection_modifyitems,
    read_durations,
    start_apart,
)


def test_long_files_come_first_and_unknown_files_have_the_median_duration() -> None:
    durations_s = {"short": 1.0, "middle": 5.0, "long": 60.0, "not selected": 7.0}
    assert order_files(["short", "new", "long", "middle"], durations_s) == ["long", "new", "middle", "short"]
    assert order_files(["b", "a"], {}) == ["b", "a"]


def test_only_one_worker_starts_with_a_file_that_needs_the_shared_run() -> None:
    assert start_apart(["a", "b", "c", "d"], {"a", "b"}, 2) == ["a", "c", "b", "d"]
    assert start_apart(["a", "b", "c", "d"], {"b", "c"}, 3) == ["a", "b", "d", "c"]
    assert start_apart(["a", "b"], {"a", "b"}, 2) == start_apart(["a", "b"], set(), 2) == ["a", "b"]


def test_only_workers_sort_files_and_the_tests_of_a_file_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest_first, "read_durations", lambda: {"a.py": 1.0, "b.py": 2.0})
    items: list[Any] = [SimpleNamespace(nodeid=nodeid) for nodeid in ("a.py::1", "b.py::2", "b.py::1")]
    worker = SimpleNamespace(workerinput={"workercount": 2})
    for config, expected in [(SimpleNamespace(), items), (worker, [*items[1:], items[0]])]:
        ordered = list(items)
        pytest_collection_modifyitems(config, ordered)
        assert ordered == expected


def test_new_durations_replace_earlier_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short files and removed files are not recorded."""
    monkeypatch.setattr(longest_first, "DURATIONS", tmp_path / "durations.json")
    earlier = {"slow.py": 9.0, "kept.py": 3.0, "now_short.py": 8.0, "removed.py": 7.0}
    longest_first.DURATIONS.write_text(json.dumps(earlier))
    for name in ("slow.py", "kept.py", "now_short.py"):
        (tmp_path / name).touch()
    recorder = Recorder()
    for nodeid, duration in [("slow.py::a", 1.5), ("slow.py::b[x]", 0.56), ("now_short.py::a", 0.1)]:
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=duration))
    recorder.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace(rootpath=tmp_path)))
    assert read_durations() == {"slow.py": 2.1, "kept.py": 3.0}


def test_files_with_recorded_durations_exist() -> None:
    assert [file for file in read_durations() if not (DURATIONS.parents[1] / file).exists()] == []
