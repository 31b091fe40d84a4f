"""The benchmark of weights between nodes, with few of them: every figure is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KEYS = {
    *("mib", "copied_bytes_per_s", "fetched_bytes_per_s", "ratio_to_copy", "nodes", "nodes_bytes_per_s"),
    *("nodes_ratio_to_one", "server_cpu_s_per_gb", "node_cpu_s_per_gb", "worst_lag_ms", "server_peak_mib"),
}


def test_the_last_line_holds_every_figure() -> None:
    command = [sys.executable, "-m", "benchmarks.weights", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) == KEYS
    assert all(figures[key] > 0 for key in KEYS)
