"""Errors, limits and failures of the checks in benchmarks.gpu.check."""

import math

import pytest
import torch
from torch import Tensor

from asterism.engine.model.packed_attention import Segments, attend_segments
from benchmarks.gpu.check import summarize
from benchmarks.gpu.checks import kernel_checks, model_checks
from benchmarks.gpu.checks.measured import Measured, compute_relative_error, compute_worst_error, count_differing
from tests.benchmarks.programs import run_program

CPU = torch.device("cpu")


def test_an_error_that_is_not_a_number_fails() -> None:
    assert Measured("x", 0.0, 0.0).has_passed
    assert not Measured("x", 1e-3, 1e-4).has_passed
    assert not Measured("x", math.nan, 1.0).has_passed


def test_the_worst_error_ignores_a_relatively_small_tensor() -> None:
    expected = {"a": torch.full((4,), 100.0), "b": torch.full((4,), 10.0), "c": torch.full((4,), 1e-6)}
    found = {"a": expected["a"], "b": expected["b"] * 1.1, "c": torch.zeros(4)}
    assert compute_worst_error(found, expected) == pytest.approx(0.1)
    assert math.isnan(compute_worst_error({**found, "a": torch.full((4,), math.nan)}, expected))
    assert compute_relative_error(torch.zeros(3), torch.zeros(3)) == 0.0


def test_zeros_of_different_sign_differ_in_bits() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        zeros = torch.zeros(5, dtype=dtype)
        assert count_differing([zeros], [zeros.clone()]) == 0
        assert count_differing([zeros], [-zeros]) == 5


def test_a_result_above_its_limit_and_an_unfinished_check_fail_the_summary() -> None:
    good = {"check": "a", "name": "x", "error": 0.1, "limit": 1.0, "passed": True}
    lines = [good, {"check": "a", "finished": 2.0}, {**good, "check": "b", "passed": False}]
    summary = summarize(lines, {"c": "no result after 5 s"})
    assert not summary["passed"]
    assert summary["failed"] == ["b: x", "c"]
    assert summary["seconds"] == {"a": 2.0}
    assert summarize(lines[:2], {})["passed"]


def test_attention_that_mixes_two_sequences_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend_as_one(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, segments: Segments) -> Tensor:
        return attend_segments(q_THD, k_TKD, v_TKD, segments._replace(lengths=(sum(segments.lengths),)))

    monkeypatch.setattr(kernel_checks, "_LENGTHS", (20, 30))
    assert all(each.has_passed for each in kernel_checks.check_segments(CPU))
    monkeypatch.setattr(kernel_checks, "attend_segments", attend_as_one)
    assert not any(each.has_passed for each in kernel_checks.check_segments(CPU))


def test_the_check_of_shared_prompts_passes_and_finds_responses_without_their_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend_without_prompts(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, segments: Segments) -> Tensor:
        return attend_segments(q_THD, k_TKD, v_TKD, segments._replace(families=()))

    monkeypatch.setattr(kernel_checks, "_FAMILIES", ((20, 10, 4), (30,)))
    assert all(each.has_passed for each in kernel_checks.check_shared_prompts(CPU))
    monkeypatch.setattr(kernel_checks, "attend_segments", attend_without_prompts)
    assert not any(each.has_passed for each in kernel_checks.check_shared_prompts(CPU))


@pytest.mark.slow
def test_weights_that_differ_by_a_thousandth_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_checks.build_small_config()
    expected = model_checks.compute(config, CPU)
    monkeypatch.setattr(model_checks, "_STD", 0.05 * 1.001)
    found = model_checks.compute(config, CPU)
    assert not any(each.has_passed for each in model_checks.compare(found, expected, 1e-4))


@pytest.mark.slow
def test_a_check_beyond_its_limit_fails_and_the_next_check_runs_in_a_new_process() -> None:
    result = run_program("gpu.check --device cpu --quick --limit-s 0.3 --only segments,weights", code=1)
    assert result["failures"] == dict.fromkeys(("segments", "weights"), "no result after 0.3 s")
