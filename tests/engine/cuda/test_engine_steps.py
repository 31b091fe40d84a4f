"""Tests of the embedded engine's steps on fake CUDA: prefill, decode with and without graphs, changed weights."""

import pytest

from tests.engine.cuda.case_reports import CaseReport, run_groups
from tests.engine.cuda.case_table import ENGINE_CASES
from tests.engine.cuda.ceilings import count_engine_case, list_exceeded, read_ceilings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports() -> dict[str, CaseReport]:
    return run_groups("engine")


@pytest.mark.parametrize("name", ENGINE_CASES)
def test_a_step_of_the_engine_runs_on_one_device_below_its_ceilings(name: str, reports: dict[str, CaseReport]) -> None:
    report = reports[name]
    assert report.error == "" and report.mixed_devices == [], f"{report.mixed_devices}\n{report.error}"
    assert report.kernels > 0
    assert list_exceeded(count_engine_case(report), read_ceilings()[name]) == []


@pytest.mark.parametrize("name", [name for name, case in ENGINE_CASES.items() if case.has_graphs])
def test_a_graph_contains_no_wait_and_no_copy_from_the_host(name: str, reports: dict[str, CaseReport]) -> None:
    assert reports[name].captured_waits == []


def test_a_graph_launches_fewer_kernels_than_eager_decode(reports: dict[str, CaseReport]) -> None:
    assert reports["decode with graphs"].kernels < reports["decode"].kernels
