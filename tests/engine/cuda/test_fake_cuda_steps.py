"""Tests of steps on fake CUDA: each case of case_table.py runs one step of the learner or of the embedded engine.

Kernels and bytes are below the recorded ceilings (ceilings.py), the peak of live tensors is near the planned memory
(analysis/planning), and planted defects are found.
"""

from collections.abc import Iterable
from typing import Any, cast

import pytest

from asterism.analysis.planning.activation_memory import compute_activation_memory
from asterism.analysis.planning.learner_memory import RankMemory, RankShare, compute_rank_memory
from asterism.analysis.planning.model_size import measure_model
from asterism.engine.inference.buffer_sizes import count_sampling_bytes
from tests.engine.cuda.case_reports import CaseReport, run_groups
from tests.engine.cuda.case_table import (
    ENGINE_CASES,
    LEARNER_CASES,
    NIGHTLY_CASES,
    PLANTED_CASES,
    SAMPLING_CASES,
    SAMPLING_VOCABULARY,
    WIDE_CASES,
    WideCase,
)
from tests.engine.cuda.ceilings import count_engine_case, count_wide_case, list_exceeded, read_ceilings

pytestmark = pytest.mark.slow

MAX_SYNCS_PER_UPDATE = 5
# functions that are allowed to wait for the GPU, at the end of an update
ALLOWED_SYNCS = {
    "asterism.engine.learner.loss_reduction:reduce_outputs",
    "asterism.engine.learner.trainer:Trainer._apply_gradients",
    "asterism.engine.model.experts:compute_expert_load",
    "asterism.engine.learner.distributed:_find_on_any_rank",  # only in the check of the weights
}
_VALUE_BYTES = 2  # a value in bfloat16
TOKENS, WIDTH, INNER, HEADS, KV_HEADS = 64, 32, 48, 64, 32  # small model; HEADS and KV_HEADS include head_dim


@pytest.fixture(scope="module")
def reports() -> dict[str, CaseReport]:
    """Return the reports of all cases from one process, because each start takes seconds."""
    return run_groups("learner", "engine", "sampling", "wide", "parts", "planted")


@pytest.fixture(scope="module")
def nightly_reports() -> dict[str, CaseReport]:
    return run_groups("nightly")


@pytest.fixture
def report(request: pytest.FixtureRequest, name: str) -> CaseReport:
    """Return the report of a case without errors."""
    found = request.getfixturevalue("nightly_reports" if name in NIGHTLY_CASES else "reports")[name]
    assert found.error == "" and found.mixed_devices == [], f"{found.mixed_devices}\n{found.error}"
    return found


def mark_nightly(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY_CASES else name for name in names]


# ---------------------------------------------------------------- the learner


for_learner_cases = pytest.mark.parametrize("name", mark_nightly(LEARNER_CASES))
for_steps = pytest.mark.parametrize("name", mark_nightly([*LEARNER_CASES, "compiled, none"]))


@for_steps
def test_a_step_waits_for_the_gpu_only_at_its_end(report: CaseReport) -> None:
    assert set(report.syncs) <= ALLOWED_SYNCS
    assert 0 < len(report.syncs) <= MAX_SYNCS_PER_UPDATE * report.updates


@for_steps
def test_a_step_copies_from_page_locked_memory_and_does_not_wait(report: CaseReport) -> None:
    assert report.pageable_copies == []
    assert report.blocking_copies == []


@for_learner_cases
def test_every_collective_has_a_non_empty_tensor_on_the_gpu(report: CaseReport) -> None:
    assert report.sent > 0
    assert report.collectives == []


def test_every_part_of_a_step_launches_kernels(reports: dict[str, CaseReport]) -> None:
    launched = {part for part, count in reports["qwen3"].parts.items() if count.kernels}
    assert launched == {"layers", "attention", "ends", "head", "loss", "gradients", "optimizer"}


# ---------------------------------------------------------------- the embedded engine


@pytest.mark.parametrize("name", ENGINE_CASES)
def test_an_engine_step_uses_one_device_and_stays_below_its_ceilings(name: str, report: CaseReport) -> None:
    assert report.kernels > 0
    assert list_exceeded(count_engine_case(report), read_ceilings()[name]) == []


@pytest.mark.parametrize("name", [name for name, case in ENGINE_CASES.items() if case.has_graphs])
def test_a_graph_contains_no_wait_and_no_copy_from_the_host(name: str, reports: dict[str, CaseReport]) -> None:
    assert reports[name].captured_waits == []


def test_a_graph_launches_fewer_kernels_than_eager_decode(reports: dict[str, CaseReport]) -> None:
    assert reports["decode with graphs"].kernels < reports["decode"].kernels


@pytest.mark.parametrize("name", SAMPLING_CASES)
def test_the_peak_of_a_decode_step_is_within_a_tenth_of_the_formula(name: str, report: CaseReport) -> None:
    case = SAMPLING_CASES[name]
    planned = count_sampling_bytes(case.rows, SAMPLING_VOCABULARY, has_filter=case.has_filter)
    assert report.peak_bytes == pytest.approx(planned, rel=0.1), f"peak in {report.peak_place}"


# ---------------------------------------------------------------- wide models


def plan_case(case: WideCase) -> RankMemory:
    """Plan the memory of one rank on a GPU in bfloat16, as `asterism plan` does."""
    config = case.build_config()
    mode = cast(Any, case.mode)
    activations = compute_activation_memory(
        config, case.tokens, _VALUE_BYTES, mode, has_packed_kernel=True, is_compiled=case.compiles
    )
    share = RankShare(value_bytes=_VALUE_BYTES, keeps_casts=case.mode == "none")
    return compute_rank_memory(measure_model(config), share, activations)


for_wide_cases = pytest.mark.parametrize("name", mark_nightly(WIDE_CASES))


@for_wide_cases
def test_the_peak_of_live_tensors_is_within_a_tenth_of_the_plan(name: str, report: CaseReport) -> None:
    planned = plan_case(WIDE_CASES[name]).total
    assert report.peak_bytes == pytest.approx(planned, rel=0.1), f"peak in {report.peak_place}"


@for_wide_cases
def test_a_step_stays_below_its_ceilings(name: str, report: CaseReport) -> None:
    assert list_exceeded(count_wide_case(name, report), read_ceilings()[name]) == []


def test_compiled_layers_move_less_memory_than_eager_layers(reports: dict[str, CaseReport]) -> None:
    eager, compiled = (reports[name].parts["layers"] for name in ("eager, none", "compiled, none"))
    assert compiled.bytes < 0.7 * eager.bytes
    assert compiled.flops == eager.flops


# ---------------------------------------------------------------- compiled parts alone


def test_the_counted_operations_equal_the_formula_for_products(reports: dict[str, CaseReport]) -> None:
    products = {"project": WIDTH * (HEADS + 2 * KV_HEADS), "finish": WIDTH * (HEADS + 3 * INNER)}
    for part, multiplications in products.items():
        assert reports[part].error == ""
        assert reports[part].parts["forward"].flops == 2 * TOKENS * multiplications
        assert reports[part].parts["backward"].flops == 2 * reports[part].parts["forward"].flops


def test_fused_kernels_are_fewer_than_operations(reports: dict[str, CaseReport]) -> None:
    """A forward pass has 3 or 4 products, conversions of parameters, and fused norms, rotations and SwiGLU."""
    assert 6 <= reports["project"].parts["forward"].kernels <= 9
    assert 7 <= reports["finish"].parts["forward"].kernels <= 11


# ---------------------------------------------------------------- planted defects


def test_the_planted_empty_maxima_in_host_memory_are_found(reports: dict[str, CaseReport]) -> None:
    assert "all_reduce of (0,) on cpu" in reports["empty CPU maxima"].collectives


def test_the_planted_read_of_a_value_is_found(reports: dict[str, CaseReport]) -> None:
    assert set(reports["item"].syncs) - ALLOWED_SYNCS == {"asterism.engine.learner.trainer:Trainer._forward_backward"}


def test_the_planted_mask_in_host_memory_is_found(reports: dict[str, CaseReport]) -> None:
    report = reports["CPU mask"]
    assert report.mixed_devices == ["aten::mul.Tensor at asterism.engine.model.packed_attention:attend"]
    assert "Expected all tensors to be on the same device" in report.error


def test_the_planted_pageable_copy_is_found(reports: dict[str, CaseReport]) -> None:
    assert reports["pageable copy"].pageable_copies != []


@pytest.mark.parametrize(
    ("defect", "figure"),
    [("eager layers", "kernels per layer"), ("eager head", "head bytes"), ("unfused norm", "bytes per layer")],
)
def test_a_planted_removal_of_a_fusion_is_found(defect: str, figure: str, reports: dict[str, CaseReport]) -> None:
    _, name = PLANTED_CASES[defect]
    assert reports[defect].error == ""
    exceeded = list_exceeded(count_wide_case(name, reports[defect]), read_ceilings()[name])
    assert figure in {each.split(":")[0] for each in exceeded}
