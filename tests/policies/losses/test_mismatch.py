"""Importance weights, metrics and limit of the mismatch, and losses that stay finite for any log ratio."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asterism.policies.losses.grpo import compute_cispo_loss, compute_grpo_loss, compute_gspo_loss
from asterism.policies.losses.mismatch import (
    Correction,
    compute_correction,
    compute_mismatch_metrics,
    describe_excessive_mismatch,
)
from asterism.policies.losses.policy_objective import estimate_kl
from tests.engine.learner.learner_settings import change_learner, make_learner
from tests.policies.losses.loss_inputs import build_loss_input

RECOMPUTED = make_learner(old_logprobs="recomputed", correction="none")
# log(pi_old / mu) of five tokens with the weights 0.1, 0.7, 1, 1.5 and 5
DIFFERENCES = torch.tensor([math.log(each) for each in (0.1, 0.7, 1.0, 1.5, 5.0)], dtype=torch.float64)
UNCORRECTED = Correction(torch.ones(5), torch.zeros(5, dtype=torch.bool), torch.zeros(5, dtype=torch.bool))


@pytest.mark.parametrize(
    ("kind", "weights", "masked", "truncated"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0, 1.0], 0, 0),
        ("tis", [0.1, 0.7, 1.0, 1.5, 2.0], 0, 1),
        ("icepop", [0.0, 0.7, 1.0, 1.5, 0.0], 2, 0),
        ("decoupled", [0.1, 0.7, 1.0, 1.5, 0.0], 1, 0),
    ],
)
def test_each_correction_weights_masks_and_truncates(
    kind: str, weights: list[float], masked: int, truncated: int
) -> None:
    learner = make_learner(old_logprobs="recomputed", correction=kind)  # pyright: ignore[reportArgumentType]
    correction = compute_correction(DIFFERENCES - 2, torch.full((5,), -2.0, dtype=torch.float64), learner)
    assert correction.weights_N.tolist() == pytest.approx(weights)
    assert (int(correction.is_masked_N.sum()), int(correction.is_truncated_N.sum())) == (masked, truncated)


def test_metrics_contain_kl_estimates_shares_and_both_tails() -> None:
    output = compute_mismatch_metrics(DIFFERENCES - 2, torch.full((5,), -2.0), UNCORRECTED)
    ratios = [0.1, 0.7, 1.0, 1.5, 5.0]
    means = {name: value.item() for name, value in output.token_means.items()}
    assert means["mismatch_k1"] == pytest.approx(-sum(map(math.log, ratios)))
    assert means["mismatch_k3"] == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios))
    assert (means["mismatch_above_0.2"], means["mismatch_above_1"]) == (4, 2)
    assert output.maxima["mismatch_max"].item() == pytest.approx(math.log(10))
    assert output.maxima["mismatch_lowest"].item() == pytest.approx(math.log(10))  # the metric is negated
    assert output.maxima["mismatch_highest"].item() == pytest.approx(math.log(5))


def test_one_confident_disagreement_among_1000_tokens_is_counted_although_means_hide_it() -> None:
    behaviour_N = torch.full((1000,), math.log(0.9), dtype=torch.float64)
    learner_N = behaviour_N.clone()
    learner_N[17] -= 2.5
    learner_N[18] -= 1.9
    behaviour_N[19], learner_N[19] = math.log(0.4), math.log(0.01)
    none_N = torch.zeros(1000, dtype=torch.bool)
    output = compute_mismatch_metrics(learner_N, behaviour_N, Correction(torch.ones(1000), none_N, none_N))
    assert output.token_means["mismatch_confident"].item() == 1
    assert output.token_means["mismatch_k3"].item() / 1000 < 0.05


def test_metrics_are_computed_before_any_clamp_and_are_finite() -> None:
    output = compute_mismatch_metrics(torch.tensor([0.0]), torch.tensor([-100.0]), UNCORRECTED)
    assert output.token_means["mismatch_k3"].item() == pytest.approx(math.exp(100), rel=1e-6)
    assert output.maxima["mismatch_highest"].item() == 100.0


def test_a_micro_batch_without_tokens_has_the_same_metrics_with_zeros() -> None:
    empty = torch.zeros(0)
    correction = compute_correction(empty, empty, change_learner(RECOMPUTED, correction="tis"))
    output = compute_mismatch_metrics(empty, empty, correction)
    assert {value.item() for value in (*output.token_means.values(), *output.maxima.values())} == {0.0}


@given(
    st.sampled_from([compute_grpo_loss, compute_gspo_loss, compute_cispo_loss]),
    st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=6),
    st.floats(-3, 3, width=32),
    st.sampled_from([0.0, 3.0]),
)
def test_loss_and_gradient_are_finite_for_any_log_ratio(
    compute: object, differences: list[float], advantage: float, clip_dual: float
) -> None:
    logprobs_N = torch.tensor(differences, requires_grad=True)
    advantages_N = torch.full((len(differences),), advantage)
    batch = build_loss_input(logprobs_N, torch.zeros(len(differences)), advantages_N, clip_dual=clip_dual)
    loss = compute(batch).loss  # pyright: ignore
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient_N).all()


def test_dual_clip_bounds_the_loss_of_a_bad_token_and_removes_its_gradient() -> None:
    logprobs_N = torch.tensor([math.log(10.0), math.log(2.0)], requires_grad=True)
    batch = build_loss_input(logprobs_N, torch.zeros(2), torch.tensor([-1.0, -1.0]), clip_dual=3.0)
    output = compute_grpo_loss(batch)
    (gradient_N,) = torch.autograd.grad(output.loss, logprobs_N)
    assert output.loss.item() == pytest.approx((3.0 + 2.0) / 2)
    assert gradient_N.tolist() == pytest.approx([0.0, 1.0])
    assert output.token_means["clip_fraction"] == 1


@pytest.mark.parametrize("share", [0.11, 1.0])
def test_an_excessive_mismatch_is_described_with_its_figures_and_causes(share: float) -> None:
    metrics = {"mismatch_above_1": share, "mismatch_k3": 0.5, "mismatch_max": 7.25}
    message = describe_excessive_mismatch(metrics, 0.1)
    assert message is not None
    for part in ("learner.loss.mismatch_limit", f"{share:.1%}", "0.5 nats", "7.25", "other weights", "temperature"):
        assert part in message
    assert describe_excessive_mismatch(metrics, 0.0) is None
    assert describe_excessive_mismatch(metrics | {"mismatch_above_1": 0.1}, 0.1) is None


@pytest.mark.parametrize(
    ("dtype", "settings", "resolved"),
    [
        ("float32", {}, ("engine", "none")),
        ("bfloat16", {}, ("recomputed", "tis")),
        ("bfloat16", {"old_logprobs": "engine"}, ("engine", "none")),
        ("bfloat16", {"correction": "none"}, ("recomputed", "none")),
        ("float32", {"correction": "icepop"}, ("recomputed", "icepop")),
        ("float32", {"old_logprobs": "recomputed"}, ("recomputed", "none")),
        ("float32", {"dtype": "bfloat16"}, ("recomputed", "tis")),
    ],
)
def test_auto_depends_on_the_dtypes_of_engine_and_learner(
    dtype: str, settings: dict[str, str], resolved: tuple[str, str]
) -> None:
    learner = make_learner(**settings).resolve_auto(dtype)  # pyright: ignore[reportArgumentType]
    assert (learner.loss.old_logprobs, learner.loss.correction) == resolved


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_dual": 0.5}, "clip_dual must exceed 1"),
        ({"correction_low": 2.5}, "correction_low = 2.5 must be below correction_high = 2"),
        ({"function": "gspo"}, 'set mean = "sequence"'),
        ({"old_logprobs": "engine", "correction": "tis"}, 'set old_logprobs = "recomputed"'),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_learner(**settings)  # pyright: ignore[reportArgumentType]


def test_kl_estimates_agree_for_equal_policies_and_follow_their_formulas() -> None:
    logprobs_N, reference_N = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5])
    for kind, expected in (("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)):
        assert estimate_kl(logprobs_N, reference_N, kind, 20.0).tolist() == pytest.approx([0.0, expected])
