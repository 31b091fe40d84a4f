"""Tests of learner steps on fake CUDA: each case of case_table.py runs one step."""

import pytest

from tests.engine.cuda.case_reports import CaseReport, run_groups
from tests.engine.cuda.case_table import LEARNER_CASES

pytestmark = pytest.mark.slow

MAX_SYNCS_PER_UPDATE = 5
# functions that may wait for the GPU, at the end of an update
ALLOWED_SYNCS = {
    "asterism.engine.learner.loss_reduction:reduce_outputs",
    "asterism.engine.learner.trainer:Trainer._apply_gradients",
    "asterism.engine.model.experts:compute_expert_load",
    "asterism.engine.learner.distributed:_find_on_any_rank",  # in the check of the weights
}


@pytest.fixture(scope="module")
def reports() -> dict[str, CaseReport]:
    return run_groups("learner")


@pytest.fixture(params=LEARNER_CASES)
def report(request: pytest.FixtureRequest, reports: dict[str, CaseReport]) -> CaseReport:
    found = reports[request.param]
    assert found.error == "" and found.mixed_devices == [], f"{found.mixed_devices}\n{found.error}"
    return found


def test_a_step_waits_for_the_gpu_only_at_its_end(report: CaseReport) -> None:
    assert set(report.syncs) <= ALLOWED_SYNCS
    assert 0 < len(report.syncs) <= MAX_SYNCS_PER_UPDATE * report.updates


def test_a_step_copies_from_page_locked_memory_and_does_not_wait(report: CaseReport) -> None:
    assert report.pageable_copies == []
    assert report.blocking_copies == []


def test_a_tensor_in_a_collective_is_on_the_gpu_and_has_elements(report: CaseReport) -> None:
    assert report.sent > 0
    assert report.collectives == []


def test_a_step_launches_kernels_of_every_part(reports: dict[str, CaseReport]) -> None:
    launched = {part for part, count in reports["qwen3"].parts.items() if count.kernels}
    assert launched == {"layers", "attention", "ends", "head", "loss", "gradients", "optimizer"}
