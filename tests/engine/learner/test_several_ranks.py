"""Tests: training on 1, 2 and 4 ranks gives equal gradients and weights for any sharding of parameters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asterism.engine.learner.distributed import gather_full_parameters
from tests.engine.learner.adapters.adapted_models import SETTINGS, read_peft_files
from tests.engine.learner.train_ranks import Outcome, RankScript, make_model, train

pytestmark = pytest.mark.slow
CASES = [*((stage, is_tied) for stage in ("sft", "rl", "recomputed") for is_tied in (True, False)), ("experts", True)]
FEW_CASES = [("sft", True), ("rl", False), ("recomputed", True), ("experts", True)]
PLAN_METRICS = ("fill", "imbalance", "shared_prompt_share")
ONCE = {"activation_checkpointing": "selective", "reduce_gradients": "once"}


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, float]:
    """Return the norm of the difference and its largest element, both relative to the norm of `one`."""
    x, y = (torch.cat([each[name].double().flatten() for name in one]) for each in (one, other))
    return float((x - y).norm() / x.norm()), float((x - y).abs().max() / x.norm())


def are_equal(one: Outcome, other: Outcome) -> bool:
    """Compare in float32. Elements with gradients near 0 are excluded, because Adam amplifies their rounding."""
    _, largest = differences(one.gradients, other.gradients)
    bound = 1e-7 * max(float(gradient.abs().max()) for gradient in one.gradients.values())
    kept = {name: gradient.abs() > bound for name, gradient in one.gradients.items()}
    assert sum(int(each.sum()) for each in kept.values()) > 0.9 * sum(each.numel() for each in kept.values())
    mine, theirs = ({name: each.parameters[name][kept[name]] for name in kept} for each in (one, other))
    norm, _ = differences(mine, theirs)
    return norm <= 1e-6 and largest <= 1e-6


def without_plan(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in PLAN_METRICS}


def make_scripts(cases: Sequence[tuple[str, bool]], chunk_tokens: int = 0, **learner: Any) -> list[RankScript]:
    return [RankScript(stage, is_tied=is_tied, learner=learner, chunk_tokens=chunk_tokens) for stage, is_tied in cases]


def list_forms(outcome: Outcome) -> set[tuple[bool, str]]:
    """Return each combination of sharding and dtype among the parameters."""
    return {(form.is_sharded, form.dtype) for form in outcome.parameter_forms.values()}


@pytest.mark.parametrize(
    ("ranks", "cases", "options"),
    [
        (2, FEW_CASES, ONCE),
        pytest.param(2, CASES, ONCE, marks=pytest.mark.nightly),
        pytest.param(4, CASES, {"activation_checkpointing": "full"}, marks=pytest.mark.nightly),
        pytest.param(2, CASES, {}, marks=pytest.mark.nightly),
    ],
)
def test_gradients_and_parameters_do_not_depend_on_ranks_and_micro_batches(
    ranks: int, cases: list[tuple[str, bool]], options: dict[str, Any]
) -> None:
    """The ranks compute logits in different numbers of chunks."""
    alone = train(1, *make_scripts(cases))
    together = train(ranks, *make_scripts(cases, chunk_tokens=5, micro_batch_tokens=40, **options))
    for (stage, is_tied), one, several in zip(cases, alone, together, strict=True):
        start = gather_full_parameters(make_model(stage, is_tied=is_tied))
        assert differences(one.parameters, start)[0] > 1e-3
        assert are_equal(one, several)
        for mine, other in zip(one.metrics, several.metrics, strict=True):
            assert without_plan(mine) == pytest.approx(without_plan(other), rel=1e-3, abs=1e-6)
        assert list_forms(several) == {(True, "torch.float32")}


@pytest.mark.nightly
def test_compiled_layers_of_two_ranks_give_the_same_update() -> None:
    """The cases have recomputed activations, experts, or adapters with a reference model."""

    def make_cases(**settings: Any) -> list[RankScript]:
        adapted = settings | {"activation_checkpointing": "full", "rank": 2, "kl_coef": 0.1, "lr": 1e-3}
        return [
            *(RankScript(stage, end=2, learner=settings) for stage in ("recomputed", "experts")),
            RankScript("sft", end=2, is_tied=False, learner=settings),
            RankScript("adapted", end=2, learner=adapted),
        ]

    alone = train(1, *make_cases())
    together = train(2, *make_cases(compile=True, micro_batch_tokens=40))
    for one, two in zip(alone, together, strict=True):
        assert are_equal(one, two)
        assert list_forms(two) == {(True, "torch.float32")}


@pytest.mark.nightly
def test_two_replicas_of_two_shards_give_the_same_update() -> None:
    alone = train(1, *make_scripts(CASES[:4]))
    together = train(4, *make_scripts(CASES[:4], ranks=4, dp_replicate=2))
    for one, four in zip(alone, together, strict=True):
        assert are_equal(one, four)
        shares = [form.local_share for form in four.parameter_forms.values()]
        assert shares == pytest.approx([0.5] * len(shares), abs=0.01)


@pytest.mark.parametrize(
    ("ranks", "is_tied"),
    [(2, False), *(pytest.param(*each, marks=pytest.mark.nightly) for each in [(1, False), (1, True), (2, True)])],
)
def test_training_in_bfloat16_has_float32_weights_gradients_and_moments(ranks: int, is_tied: bool) -> None:
    cases = [(stage, is_tied) for stage in ("sft", "recomputed")]  # old log probabilities are equal in both dtypes
    exact, rounded = (make_scripts(cases, dtype=dtype) for dtype in ("float32", "bfloat16"))
    for one, other in zip(train(1, *exact), train(ranks, *rounded), strict=True):
        assert list_forms(other) == {(ranks > 1, "torch.float32")}
        assert other.gradient_dtypes == other.optimizer_dtypes == {"torch.float32"}
        assert 1e-5 < differences(one.parameters, other.parameters)[0] < 0.01
        assert 1e-3 < differences(one.gradients, other.gradients)[0] < 0.1
        for mine, theirs in zip(one.metrics, other.metrics, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=0.03)


@pytest.mark.parametrize(
    ("first", "second"),
    [(2, 1), *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in [(1, 2), (2, 4), (4, 1)])],
)
def test_a_checkpoint_can_resume_with_another_number_of_ranks(first: int, second: int, tmp_path: Path) -> None:
    """All ranks write a checkpoint of whole weights with a rounded export, and a checkpoint of adapters."""
    cases = {"whole": {"export_dtype": "bfloat16"}, "adapters": SETTINGS}
    checkpoints = {name: tmp_path / name / "checkpoint" for name in cases}
    straight = train(1, *(RankScript("rl", end=4, learner=learner) for learner in cases.values()))
    whole, adapted = train(
        first,
        *(
            RankScript("rl", end=2, saved=str(checkpoints[name].parent), max_shard_bytes=20_000, learner=learner)
            for name, learner in cases.items()
        ),
    )
    assert all(len(list(each.glob("model-*.safetensors"))) > 2 for each in checkpoints.values())
    exported = AutoModelForCausalLM.from_pretrained(checkpoints["whole"], dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(exported[name], each.bfloat16()) for name, each in whole.parameters.items())
    adapters = read_peft_files(checkpoints["adapters"])[1]
    assert all(
        torch.equal(adapted.parameters[name.removeprefix("base_model.model.")], each) for name, each in adapters.items()
    )
    resumed = (RankScript("rl", 2, 4, checkpoint=str(checkpoints[name]), learner=cases[name]) for name in cases)
    for expected, found in zip(straight, train(second, *resumed), strict=True):
        assert differences(expected.parameters, found.parameters)[0] <= 1e-6
