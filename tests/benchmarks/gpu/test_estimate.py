"""The estimated model FLOP/s utilization of a GRPO step exceeds the floor in docs/gpu.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FLOORS = {"1.7B_8192": 0.42, "1.7B_16384": 0.42, "4B_8192": 0.38, "4B_16384": 0.38}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_estimate_of_each_step_exceeds_its_floor() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.estimate"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=800)
    figures = json.loads(finished.stdout.splitlines()[-1])
    found = {name: figures[f"{name}.mfu"] for name in FLOORS}
    assert all(found[name] >= floor for name, floor in FLOORS.items()), found
