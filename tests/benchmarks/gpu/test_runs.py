"""The error of a section contains the output of its run, whether the run fails or the section is killed."""

from pathlib import Path

import pytest

from benchmarks.gpu.result_file import find_figures
from tests.benchmarks.gpu.test_process_group import run_section

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

# A section that measures a run: `asterism run` with a number of steps, or a shell command in its place.
MEASURED_RUN = """
import sys
from pathlib import Path
from benchmarks.gpu import runs
folder, steps, *shell = sys.argv[1:]
if shell:
    runs.build_command = lambda *_: ["sh", "-c", *shell]
runs.run_asterism(Path(folder), {**runs.QUICK, "rl.steps": steps})
"""


def test_a_sections_error_has_the_output_of_its_failed_run(tmp_path: Path) -> None:
    error = str(find_figures(run_section(MEASURED_RUN, str(tmp_path), "-1", limit_s=100.0), 100.0)["error"])
    assert "rl.steps" in error
    assert error.endswith("asterism run ended with exit code 2")


def test_a_sections_error_has_the_output_of_its_killed_run(tmp_path: Path) -> None:
    finished = run_section(MEASURED_RUN, str(tmp_path), "1", "echo run demo, seed 0; sleep 600")
    assert find_figures(finished, 4.0) == {"error": "no result after 4.0 s: run demo, seed 0"}
