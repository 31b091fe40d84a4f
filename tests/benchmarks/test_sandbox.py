"""The sandbox benchmark, in its short form: every figure is there, and every call was answered once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KEYS = {
    *("print_ratio", "numpy_ratio", "sympy_ratio", "print_per_s", "numpy_per_s", "sympy_per_s"),
    *("p50_ms_1", "p99_ms_1", "p50_ms_16", "p99_ms_16", "p50_ms_256", "p99_ms_256", "overhead_256"),
    *("added_p99_ms_idle", "session_cells_per_s", "session_start_ms", "session_idle_mib"),
    *("burst_submitted", "burst_answered", "burst_duplicates", "burst_s", "mixed_ratio"),
}


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.sandbox", "--quick", "--backend", "process"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_last_line_holds_every_figure_by_backend(figures: dict[str, Any]):
    assert list(figures) == ["process"]
    assert set(figures["process"]) >= KEYS
    assert all(figures["process"][key] > 0 for key in KEYS - {"overhead_256", "added_p99_ms_idle", "burst_duplicates"})


def test_every_call_of_the_burst_is_answered_once(figures: dict[str, Any]):
    process = figures["process"]
    assert process["burst_answered"] == process["burst_submitted"] > 0
    assert process["burst_duplicates"] == 0


def test_a_ratio_is_the_rate_over_the_rate_of_a_process_per_call(figures: dict[str, Any]):
    process = figures["process"]
    for kind in ("print", "numpy", "sympy"):
        alone = process[f"{kind}_alone_per_s"]
        assert process[f"{kind}_ratio"] == pytest.approx(process[f"{kind}_per_s"] / alone, rel=1e-2)
