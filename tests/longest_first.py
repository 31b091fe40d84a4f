"""Makes pytest-xdist start the test files with the longest recorded durations first.

`make test ARGS=--record-durations` writes the seconds of its files to durations.json, without files that take less
than MIN_RECORDED_S. Files without a recorded duration count as the median of the others.
"""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
MIN_RECORDED_S = 1.0
SHARED_RUNS = {"finished_run", "cold_start"}  # fixtures that the first worker makes for all


def get_file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class Recorder:
    """Sums the seconds of set-up, call and tear-down over the tests of each file."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[get_file(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        earlier = {file: s for file, s in read_durations().items() if (session.config.rootpath / file).exists()}
        merged = {file: round(s, 1) for file, s in {**earlier, **self.seconds}.items() if s >= MIN_RECORDED_S}
        DURATIONS.write_text(json.dumps(dict(sorted(merged.items())), indent=0) + "\n")


def read_durations() -> dict[str, float]:
    return json.loads(DURATIONS.read_text())


def order_files(files: list[str], durations_s: dict[str, float]) -> list[str]:
    """Sort the files by duration, the longest first. Files of the same duration keep their order."""
    median_s = statistics.median(durations_s.values()) if durations_s else 0.0
    return sorted(files, key=lambda file: -durations_s.get(file, median_s))


def start_apart(files: list[str], shared: set[str], workers: int) -> list[str]:
    """Let only one file in `shared` start at first. It makes the shared run, for which other such files would wait."""
    first: list[str] = []
    for file in files:
        if len(first) < workers and (file not in shared or shared.isdisjoint(first)):
            first.append(file)
    return [*first, *(file for file in files if file not in first)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write the seconds of each file to {DURATIONS}")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record_durations and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests in each worker process. With --no-loadscope-reorder, pytest-xdist keeps the order of the files."""
    workers: dict[str, Any] | None = getattr(config, "workerinput", None)
    if workers is None:
        return
    files = order_files(list(dict.fromkeys(get_file(item.nodeid) for item in items)), read_durations())
    shared = {get_file(item.nodeid) for item in items if not SHARED_RUNS.isdisjoint(getattr(item, "fixturenames", ()))}
    rank = {file: number for number, file in enumerate(start_apart(files, shared, workers["workercount"]))}
    items.sort(key=lambda item: rank[get_file(item.nodeid)])
