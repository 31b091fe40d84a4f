"""Tests: the value and gradient of each loss, mean, correction and term equal plain loops in float64, for any number
of ranks, any micro batches and any order of rows."""

import functools
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asterism.bus.messages import TrainingSample
from asterism.configs.errors import UnusableInput
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.learner.loss_gradients import (
    LossCase,
    LossGradients,
    compute_gradients,
    make_reference_model,
    make_rows,
)
from tests.engine.learner.loss_reference import ReferenceSequence, compute_reference_loss
from tests.engine.learner.rank_processes import run_ranks
from tests.engine.learner.training_examples import rl_sequences, small_run, trainable_model

pytestmark = pytest.mark.slow

PLUGINS = "tests.engine.learner.plugin_losses"
MAX_TOKENS = small_run().dialogue.response_tokens
# Settings of [learner] by case. Log ratios of -6 to +6 ensure that clips, caps and the limit affect some tokens.
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"grpo {mean}": {"mean": mean} for mean in ("tokens", "group", "sequence", "constant")},
    "grpo dual": {"clip_dual": 3.0},
    "grpo limited": {"log_ratio_limit": 1.5},
    "gspo": {"function": "gspo", "mean": "sequence"},
    **{f"cispo {mean}": {"function": "cispo", "mean": mean} for mean in ("tokens", "group")},
    "recomputed": {"old_logprobs": "recomputed", "correction": "none"},
    **{
        f"{loss} {correction}": {
            "function": loss,
            "mean": mean,
            "old_logprobs": "recomputed",
            "correction": correction,
        }
        for (loss, mean), correction in product(
            (("grpo", "group"), ("gspo", "sequence"), ("cispo", "tokens")), ("tis", "icepop", "decoupled")
        )
    },
    **{f"kl {kind}": {"kl_coef": 0.3, "kl_estimator": kind} for kind in ("k1", "k2", "k3")},
    "entropy": {"entropy_coef": 0.2},
    "everything": {
        "mean": "sequence",
        "clip_dual": 2.0,
        "old_logprobs": "recomputed",
        "correction": "icepop",
        "kl_coef": 0.1,
        "entropy_coef": 0.1,
    },
    "plug-in gspo": {"function": f"{PLUGINS}:compute_gspo_loss"},
    "plug-in dr_grpo": {"function": f"{PLUGINS}:compute_dr_grpo_loss"},
}
# settings with each function and mean, with the terms of a reference model and of the entropy, and with a plug-in
FEW_SETTINGS = (
    *("grpo tokens", "grpo group", "grpo constant", "gspo decoupled", "cispo icepop"),
    *("everything", "plug-in gspo"),
)
# built-in settings that are equivalent to the loss of a plug-in
BUILT_IN = {
    "plug-in gspo": {"function": "gspo", "mean": "sequence"},
    "plug-in dr_grpo": {"mean": "constant"},
}


def read_row(row: TrainingSample) -> tuple[Tensor, Tensor, list[float]]:
    """Return token ids, the mask of loss tokens (without the first token), and the engine's logprobs of loss tokens."""
    ids = torch.from_numpy(np.frombuffer(row.record.token_ids, np.int32).astype(np.int64))
    mask = torch.from_numpy(np.frombuffer(row.record.loss_mask, np.uint8).astype(bool))
    mask[0] = False
    behaviour = torch.from_numpy(np.frombuffer(row.record.logprobs, np.float32).astype(np.float64))
    return ids, mask, behaviour[mask].tolist()


def score(model: CausalLM, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log probabilities and entropies of one sequence's loss tokens, without a batch."""
    log_p_TV = torch.log_softmax(model.compute_logits(model(ids[None, :-1]))[0], dim=-1)
    entropies_T = -(log_p_TV.exp() * log_p_TV).sum(-1)
    return log_p_TV.gather(1, ids[1:, None])[:, 0][mask[1:]], entropies_T[mask[1:]]


@functools.cache
def compute_expected(name: str) -> tuple[float, dict[str, Tensor]]:
    settings = {"minibatches": 1} | BUILT_IN.get(name, SETTINGS[name])
    learner = small_run(**settings).learner.resolve_auto("float32")
    model, reference = trainable_model().double(), make_reference_model()
    sequences = list[ReferenceSequence]()
    for row in make_rows():
        ids, mask, behaviour = read_row(row)
        logprobs, entropies = score(model, ids, mask)
        old = logprobs.tolist() if learner.loss.old_logprobs == "recomputed" else behaviour
        frozen = score(reference, ids, mask)[0].tolist() if learner.loss.kl_coef else ()
        advantage = float(np.float32(row.advantage))  # the trainer stores advantages in float32
        sequences.append(ReferenceSequence(logprobs, behaviour, old, advantage, row.group_id, list(entropies), frozen))
    loss = compute_reference_loss(sequences, learner, MAX_TOKENS)
    loss.backward()
    gradients = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-4
    return loss.item(), gradients


def compute(case: LossCase) -> LossGradients:
    return compute_gradients(RankGroup(), [case])[0]


def check(name: str, got: LossGradients, tolerance: float = 1e-10) -> None:
    loss, gradients = compute_expected(name)
    assert got.loss == pytest.approx(loss, rel=0, abs=tolerance)
    as_float64 = {key: value.double() for key, value in got.gradients.items()}
    torch.testing.assert_close(as_float64, gradients, rtol=0, atol=tolerance)
    assert got.metrics["updates"] == 1


@pytest.mark.parametrize("name", SETTINGS)
def test_value_and_gradient_equal_plain_loops(name: str) -> None:
    for micro_batch_tokens, reverse in ((40, True), (100_000, False)):
        check(name, compute(LossCase(SETTINGS[name], micro_batch_tokens, reverse)))
    check(name, compute(LossCase(SETTINGS[name], dtype="float32")), tolerance=1e-5)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [(2, FEW_SETTINGS), *(pytest.param(ranks, tuple(SETTINGS), marks=pytest.mark.nightly) for ranks in (2, 4))],
    ids=["2", "2-all", "4-all"],
)
def test_value_and_gradient_do_not_depend_on_the_number_of_ranks(ranks: int, names: tuple[str, ...]) -> None:
    cases = [LossCase(SETTINGS[name], 40 if ranks == 2 else 128) for name in names]
    for name, result in zip(names, run_ranks(ranks, compute_gradients, cases)[0], strict=True):
        check(name, result)


def test_corrections_and_clips_affect_some_tokens_of_the_rows() -> None:
    for name, figure in (("grpo tis", "correction_truncated"), ("grpo icepop", "correction_masked")):
        metrics = compute(LossCase(SETTINGS[name])).metrics
        assert 0.05 < metrics[figure] < 0.95
    assert 0 < compute(LossCase(SETTINGS["plug-in gspo"])).metrics["clipped_sequences"] <= 1


def test_metrics_whose_names_depend_on_the_data_are_refused() -> None:
    run = small_run(function=f"{PLUGINS}:compute_loss_with_changing_metrics", micro_batch_tokens=40)
    trainer = Trainer(trainable_model(), run, RankGroup())
    trainer.start_stage("rl")
    with pytest.raises(UnusableInput, match=r"learner\.loss\.function: metrics differ between micro batches: metric_"):
        trainer.run_rl_step(rl_sequences(0))
