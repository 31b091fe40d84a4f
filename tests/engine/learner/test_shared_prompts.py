"""Tests: shared prompts change neither gradients nor metrics, on one and on two ranks."""

from typing import Any

import pytest
import torch

from tests.engine.learner.test_several_ranks import without_plan
from tests.engine.learner.train_ranks import Outcome, RankScript, train

OFF: dict[str, Any] = {"shared_prompts": False}
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"function": "gspo", "mean": "sequence"},
    "recomputed": {"old_logprobs": "recomputed", "correction": "tis"},
    "adapters": {"kl_coef": 0.1, "entropy_coef": 0.1, "rank": 4},
}


def assert_equal_gradients(found: Outcome, expected: Outcome) -> None:
    """The largest difference is 1e-6 of the largest gradient."""
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=1e-6 * largest)


def assert_equal_metrics(found: Outcome, expected: Outcome) -> None:
    """The load of experts counts a shared prompt once."""
    for one, other in zip(found.metrics, expected.metrics, strict=True):
        assert one["shared_prompt_share"] > 0.2
        assert other["shared_prompt_share"] == 0.0
        mine, theirs = (
            {name: value for name, value in without_plan(each).items() if not name.startswith("expert")}
            for each in (one, other)
        )
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def compare(ranks: int, *settings: dict[str, Any], stage: str = "siblings") -> None:
    """Compare in float32, or in float64 for adapters, whose float32 gradients have rounding errors of 2e-6."""

    def make_script(learner: dict[str, Any]) -> RankScript:
        return RankScript(stage, end=2, learner=learner, is_double="rank" in learner)

    expected = train(1, *(make_script(each | OFF) for each in settings))
    found = train(ranks, *map(make_script, settings))
    for one, other in zip(found, expected, strict=True):
        assert_equal_gradients(one, other)
        assert_equal_metrics(one, other)


@pytest.mark.parametrize("name", LOSSES)
def test_shared_prompts_give_the_same_gradients_and_metrics(name: str) -> None:
    """The update has several micro batches, and the step two updates."""
    compare(1, LOSSES[name])


@pytest.mark.slow
def test_shared_prompts_of_two_ranks_give_the_gradients_of_one_rank_without_them() -> None:
    modes = [{"activation_checkpointing": mode} for mode in ("none", "selective", "attention", "full")]
    compare(2, *LOSSES.values(), *modes, {"reduce_gradients": "once", "micro_batch_tokens": 60})
    compare(2, {"activation_checkpointing": "full"}, stage="sibling experts")


@pytest.mark.slow
@pytest.mark.nightly  # compilation takes 50 s
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler reads this attribute
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's compiler uses this method
def test_compiled_layers_share_prompts() -> None:
    compare(1, {"compile": True, "activation_checkpointing": "selective"})
