"""The error of a section contains the output of its run, whether the run fails or the section is killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.programs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RUN = """
import sys
from pathlib import Path
from benchmarks.gpu.runs import QUICK, run_asterism
run_asterism(Path(sys.argv[1]), {**QUICK, "rl.steps": sys.argv[2]})
"""
# The code runs in a separate process, because run_limited kills all children of its own process.
MEASURE = """
import json, sys
from benchmarks.gpu.process_group import adopt_orphans, run_limited
from benchmarks.gpu.result_file import find_figures
adopt_orphans()
limit_s = float(sys.argv[1])
print(json.dumps(find_figures(run_limited(["-c", *sys.argv[2:]], limit_s), limit_s)))
"""


def read_error(runs: Path, steps: int, limit_s: float) -> str:
    command = [sys.executable, "-c", MEASURE, str(limit_s), RUN, str(runs), str(steps)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return str(json.loads(done.stdout)["error"])


def test_a_sections_error_has_the_output_of_its_failed_run(tmp_path: Path) -> None:
    error = read_error(tmp_path, -1, 100.0)
    assert "rl.steps" in error
    assert error.endswith("asterism run ended with exit code 2")


def test_a_sections_error_has_the_output_of_its_killed_run(tmp_path: Path) -> None:
    error = read_error(tmp_path, 100_000, 15.0)
    assert error.startswith("no result after 15.0 s: run demo, seed 0")
