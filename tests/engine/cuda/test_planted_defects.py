"""Tests: the suite finds planted defects."""

import pytest

from tests.engine.cuda.case_reports import CaseReport, run_groups
from tests.engine.cuda.case_table import PLANTED_CASES
from tests.engine.cuda.ceilings import count_wide_case, list_exceeded, read_ceilings
from tests.engine.cuda.test_learner_steps import ALLOWED_SYNCS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports() -> dict[str, CaseReport]:
    return run_groups("planted")


def test_empty_maxima_in_main_memory_are_found(reports: dict[str, CaseReport]) -> None:
    assert "all_reduce of (0,) on cpu" in reports["empty CPU maxima"].collectives


def test_a_read_of_a_value_in_a_micro_batch_is_found(reports: dict[str, CaseReport]) -> None:
    assert set(reports["item"].syncs) - ALLOWED_SYNCS == {"asterism.engine.learner.trainer:Trainer._forward_backward"}


def test_a_mask_in_main_memory_is_found(reports: dict[str, CaseReport]) -> None:
    report = reports["CPU mask"]
    assert report.mixed_devices == ["aten::mul.Tensor at asterism.engine.model.packed_attention:attend"]
    assert "Expected all tensors to be on the same device" in report.error


def test_memory_that_is_not_page_locked_is_found(reports: dict[str, CaseReport]) -> None:
    assert reports["pageable copy"].pageable_copies != []


@pytest.mark.parametrize(
    ("defect", "figure"),
    [("eager layers", "kernels per layer"), ("eager head", "head bytes"), ("unfused norm", "bytes per layer")],
)
def test_a_removed_fusion_is_found(defect: str, figure: str, reports: dict[str, CaseReport]) -> None:
    _, name = PLANTED_CASES[defect]
    assert reports[defect].error == ""
    exceeded = list_exceeded(count_wide_case(name, reports[defect]), read_ceilings()[name])
    assert figure in {each.split(":")[0] for each in exceeded}
