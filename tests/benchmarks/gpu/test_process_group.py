"""A section of benchmarks.gpu leaves no process, however it ends."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu.process_group import MEMORY_VARIABLE, Finished
from tests.benchmarks.programs import ROOT, run_program
from tests.processes import family, is_running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Runs a section in a process of its own, because run_limited kills all children of its process.
RUN_LIMITED = """
import json, sys
from benchmarks.gpu.process_group import adopt_orphans, run_limited
adopt_orphans()
print(json.dumps(run_limited(["-c", *sys.argv[2:]], float(sys.argv[1]))))
"""
# A section with temporary files. Its processes leave its process group and its session, and ignore SIGTERM.
STUBBORN = f"""
import os, signal, subprocess, sys, tempfile, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(tempfile.mkdtemp(), tempfile.mkdtemp(dir=os.environ[{MEMORY_VARIABLE!r}]), flush=True)
code = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
children = [subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(2)]
time.sleep(600)
"""
WITH_CHILD = """
import subprocess
from benchmarks.gpu.process_group import build_command, build_environment
subprocess.run(build_command("-c", "import time; time.sleep(600)"), env=build_environment())
"""
DEMO = ("-m", "benchmarks.gpu", "--quick", "--only", "run_small")


def run_section(code: str, *arguments: str, limit_s: float = 4.0) -> Finished:
    command = [sys.executable, "-c", RUN_LIMITED, str(limit_s), code, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return Finished(*json.loads(done.stdout))


def wait_until(condition: Callable[[], object], limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_section_at_its_limit_is_killed_with_processes_outside_its_group_and_leaves_no_temporary_files() -> None:
    finished = run_section(STUBBORN)
    assert finished.code is None
    *folders, one, other = finished.output.split()
    assert [Path(folder).exists() for folder in folders] == [False, False]
    assert not [pid for pid in (one, other) if is_running(int(pid))]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("arguments", "num_processes"),
    [(("-c", RUN_LIMITED, "600", WITH_CHILD), 3), pytest.param(DEMO, 5, marks=pytest.mark.nightly)],
    ids=["child", "run"],
)
def test_a_measured_run_ends_with_the_program(
    arguments: tuple[str, ...], num_processes: int, number: signal.Signals
) -> None:
    """The program ends, and so do the processes of its section: one child, or a launcher with four or more."""
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(family(process.pid)) >= num_processes)
        members = family(process.pid)
        process.send_signal(number)
        code = process.wait(60)
        if number == signal.SIGKILL:  # each generation is killed when its parents have died
            wait_until(lambda: not any(map(is_running, members)), 20.0)
    finally:
        process.kill()
        process.wait()
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
