"""A section of benchmarks.gpu leaves no process, however it ends."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.benchmarks.programs import ROOT, run_program
from tests.processes import family, is_running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# A section whose processes leave its process group and its session, and ignore SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
with open(sys.argv[1], "a") as file:
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=file, start_new_session=True) for _ in range(2)]
    time.sleep(600)
"""
RUN_STUBBORN = """
import sys
from benchmarks.gpu.process_group import adopt_orphans, run_limited
adopt_orphans()
print(run_limited(["-c", sys.argv[1], sys.argv[2]], 4.0).code)
"""
RUN_WITH_FILES = """
import os, subprocess, sys
from pathlib import Path
from benchmarks.gpu.process_group import MEMORY_VARIABLE, adopt_orphans, run_limited
adopt_orphans()
code = f"import os, tempfile, time; print(tempfile.mkdtemp(), tempfile.mkdtemp(dir=os.environ[{MEMORY_VARIABLE!r}]), flush=True); time.sleep(60)"
finished = run_limited(["-c", code], 4.0)
print(finished.code, *(Path(path).exists() for path in finished.output.split()))
"""
DEMO = ("-m", "benchmarks.gpu", "--quick", "--only", "run_small")


def wait_until(condition: Callable[[], object], limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def starting(*arguments: str) -> Generator[subprocess.Popen[str]]:
    """Start a program, and kill it at the end of the context."""
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_section_at_its_limit_is_killed_with_processes_outside_its_group(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with starting("-c", RUN_STUBBORN, STUBBORN, str(pids)) as process:
        output, _ = process.communicate(timeout=60)
    assert output.strip() == "None"
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 2
    assert not [pid for pid in left if is_running(pid)]


def test_a_section_at_its_limit_leaves_no_temporary_files() -> None:
    with starting("-c", RUN_WITH_FILES) as process:
        output, _ = process.communicate(timeout=60)
    assert output.split() == ["None", "False", "False"]


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(each, marks=pytest.mark.nightly) for each in (signal.SIGTERM, signal.SIGINT))],
)
def test_a_measured_run_ends_with_the_program(number: signal.Signals) -> None:
    """The program, the section, the launcher and the processes of the run end: five processes or more."""
    with starting(*DEMO) as process:
        wait_until(lambda: len(family(process.pid)) >= 5)
        members = family(process.pid)
        process.send_signal(number)
        code = process.wait(60)
        if number == signal.SIGKILL:  # each generation is killed when its parents have died
            wait_until(lambda: not any(map(is_running, members)), 20.0)
    assert code == {signal.SIGTERM: 128 + number, signal.SIGINT: -number, signal.SIGKILL: -number}[number]
    assert not [pid for pid in members if is_running(pid)]


@pytest.mark.nightly
def test_a_section_beyond_its_limit_is_an_error_and_other_sections_run(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    limited = run_program("gpu --quick --only passes_small --limit-s 0.2 --out", str(out), code=1)
    error = limited["passes_small.error"]
    assert error.partition(":")[0] == "no result after 0.2 s"  # the section's output on stderr follows
    run_program("gpu --quick --only head,passes_small --out", str(out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    measured = [(line["section"], "error" in line) for line in lines if line["section"] != "machine"]
    assert measured == [("passes_small", True), ("head", False), ("passes_small", False)]
