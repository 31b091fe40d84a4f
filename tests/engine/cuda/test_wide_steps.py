"""Tests of GRPO steps with Qwen3-1.7B's widths on fake CUDA: kernels and bytes are below the recorded ceilings
(ceilings.py), and the peak of live tensors is near the planned memory (analysis/planning)."""

from typing import Any, cast

import pytest

from asterism.analysis.planning.activation_memory import compute_activation_memory
from asterism.analysis.planning.learner_memory import RankMemory, RankShare, compute_rank_memory
from asterism.analysis.planning.model_size import measure_model
from tests.engine.cuda.case_reports import CaseReport, run_groups
from tests.engine.cuda.case_table import WIDE_CASES, WideCase
from tests.engine.cuda.ceilings import count_wide_case, list_exceeded, read_ceilings

pytestmark = pytest.mark.slow

_VALUE_BYTES = 2  # bfloat16
TOKENS, WIDTH, INNER, HEADS, KV_HEADS = 64, 32, 48, 64, 32  # small model of the parts; heads times head_dim


def plan_case(case: WideCase) -> RankMemory:
    """Plan memory as `asterism plan` does for one rank on a GPU in bfloat16."""
    config = case.build_config()
    mode = cast(Any, case.mode)
    activations = compute_activation_memory(
        config, case.tokens, _VALUE_BYTES, mode, has_packed_kernel=True, is_compiled=case.compiles
    )
    share = RankShare(value_bytes=_VALUE_BYTES, keeps_casts=case.mode == "none")
    return compute_rank_memory(measure_model(config), share, activations)


@pytest.fixture(scope="module")
def reports() -> dict[str, CaseReport]:
    return run_groups("wide", "parts")


@pytest.mark.parametrize("name", WIDE_CASES)
def test_the_peak_of_live_tensors_is_within_a_tenth_of_the_plan(name: str, reports: dict[str, CaseReport]) -> None:
    report = reports[name]
    assert report.error == ""
    planned = plan_case(WIDE_CASES[name]).total
    assert report.peak_bytes == pytest.approx(planned, rel=0.1), f"peak in {report.peak_place}"


@pytest.mark.parametrize("name", WIDE_CASES)
def test_a_step_stays_below_its_ceilings(name: str, reports: dict[str, CaseReport]) -> None:
    report = reports[name]
    assert report.error == ""
    assert list_exceeded(count_wide_case(name, report), read_ceilings()[name]) == []


def test_compiled_layers_move_less_memory_than_eager_layers(reports: dict[str, CaseReport]) -> None:
    eager, compiled = (reports[name].parts["layers"] for name in ("eager, none", "compiled, none"))
    assert compiled.bytes < 0.7 * eager.bytes
    assert compiled.flops == eager.flops


# ---------------------------------------------------------------- compiled parts alone


def test_the_counted_operations_equal_the_operations_of_the_products(reports: dict[str, CaseReport]) -> None:
    products = {"project": WIDTH * (HEADS + 2 * KV_HEADS), "finish": WIDTH * (HEADS + 3 * INNER)}
    for part, multiplications in products.items():
        assert reports[part].error == ""
        assert reports[part].parts["forward"].flops == 2 * TOKENS * multiplications
        assert reports[part].parts["backward"].flops == 2 * reports[part].parts["forward"].flops


def test_fused_kernels_are_fewer_than_operations(reports: dict[str, CaseReport]) -> None:
    """A forward pass has 3 or 4 products, conversions of parameters, and fused norms, rotations and SwiGLU."""
    assert 6 <= reports["project"].parts["forward"].kernels <= 9
    assert 7 <= reports["finish"].parts["forward"].kernels <= 11
