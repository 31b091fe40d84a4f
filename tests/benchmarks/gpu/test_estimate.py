"""The estimated model FLOP/s utilization of a GRPO step exceeds the floor in docs/gpu.md."""

import pytest

from tests.benchmarks.programs import run_program

FLOORS = {"1.7B_8192": 0.42, "1.7B_16384": 0.42, "4B_8192": 0.38, "4B_16384": 0.38}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_estimate_of_each_step_exceeds_its_floor() -> None:
    figures = run_program("gpu.estimate")
    found = {name: figures[f"{name}.mfu"] for name in FLOORS}
    assert all(found[name] >= floor for name, floor in FLOORS.items()), found
