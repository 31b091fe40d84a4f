"""A test that compares the peak of live tensors in decode steps on fake CUDA with the formula of `asterism plan`."""

import pytest

from asterism.engine.inference.buffer_sizes import count_sampling_bytes
from tests.engine.cuda.case_reports import CaseReport, run_groups
from tests.engine.cuda.case_table import SAMPLING_CASES, SAMPLING_VOCABULARY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports() -> dict[str, CaseReport]:
    return run_groups("sampling")


@pytest.mark.parametrize("name", SAMPLING_CASES)
def test_the_peak_of_a_decode_step_is_within_a_tenth_of_the_formula(name: str, reports: dict[str, CaseReport]) -> None:
    case, report = SAMPLING_CASES[name], reports[name]
    assert report.error == "" and report.mixed_devices == []
    planned = count_sampling_bytes(case.rows, SAMPLING_VOCABULARY, has_filter=case.has_filter)
    assert report.peak_bytes == pytest.approx(planned, rel=0.1), f"peak in {report.peak_place}"
