"""Losses by import path: their gradients equal a plain reference in float64 for any ranks and micro batches."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bus.messages import TrainingSample
from configs.errors import UnusableInput
from engine.learner.distributed import RankGroup
from engine.learner.trainer import Trainer
from tests.engine.learner.loss_gradients import compute_gradients
from tests.engine.learner.training_examples import rows, small_run, trainable_model

pytestmark = pytest.mark.slow

PLUGINS = "tests.engine.learner.plugin_losses"
LOW, HIGH, MAX_TOKENS = 0.2, 0.28, small_run().dialogue.response_tokens


def compute_log_ratios(model: torch.nn.Module, row: TrainingSample) -> Tensor:
    """log pi(y_t) - log pi_old(y_t) of the generated tokens of one sequence, without batches."""
    ids = torch.from_numpy(np.frombuffer(row.record.token_ids, np.int32).astype(np.int64))
    mask = torch.from_numpy(np.frombuffer(row.record.loss_mask, np.uint8).astype(bool))
    mask[0] = False
    log_p_TV = torch.log_softmax(model.compute_logits(model(ids[None, :-1]))[0], dim=-1)
    logprobs_T = log_p_TV.gather(1, ids[1:, None])[:, 0]
    behaviour_T = torch.from_numpy(np.frombuffer(row.record.logprobs, np.float32).astype(np.float64))
    return (logprobs_T - behaviour_T[1:])[mask[1:]]


def gspo(log_ratios: list[Tensor], advantages: list[float]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for each, advantage in zip(log_ratios, advantages, strict=True):
        s = torch.exp(each.sum() / len(each))
        total = total + min(s * advantage, torch.clamp(s, 1 - LOW, 1 + HIGH) * advantage)
    return -total / len(log_ratios)


def dr_grpo(log_ratios: list[Tensor], advantages: list[float]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for each, advantage in zip(log_ratios, advantages, strict=True):
        for log_ratio in each:
            r = torch.exp(log_ratio)
            total = total + min(r * advantage, torch.clamp(r, 1 - LOW, 1 + HIGH) * advantage)
    return -total / (len(log_ratios) * MAX_TOKENS)


def compute_reference(loss: Callable[[list[Tensor], list[float]], Tensor]) -> dict[str, Tensor]:
    model, samples = trainable_model().double(), rows(0, groups=2, size=4)
    # The trainer holds advantages in float32.
    advantages = [float(np.float32(each.advantage)) for each in samples]
    value = loss([compute_log_ratios(model, each) for each in samples], advantages)
    value.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("name", "reference"), [("compute_gspo_loss", gspo), ("compute_dr_grpo_loss", dr_grpo)])
def test_gradients_equal_a_float64_reference_on_any_ranks_and_micro_batches(
    name: str, reference: Callable[[list[Tensor], list[float]], Tensor], ranks: int, tmp_path: Path
) -> None:
    expected = compute_reference(reference)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-4
    for micro_batch_tokens in (40, 128, 100_000):
        if ranks == 1:
            gradients, metrics = compute_gradients(f"{PLUGINS}:{name}", micro_batch_tokens, RankGroup())
        else:
            out = tmp_path / f"{micro_batch_tokens}.pt"
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            script = [
                "-m",
                "tests.engine.learner.loss_gradients",
                f"{PLUGINS}:{name}",
                str(micro_batch_tokens),
                str(out),
            ]
            subprocess.run(
                [sys.executable, *command, *script], check=True, capture_output=True, cwd=Path(__file__).parents[3]
            )
            gradients, metrics = torch.load(out, weights_only=True)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-10)
        assert metrics["updates"] == 1
        if name == "compute_gspo_loss":
            assert 0 < metrics["clipped_sequences"] <= 1


def test_metrics_that_depend_on_the_data_are_refused() -> None:
    run = small_run(loss=f"{PLUGINS}:compute_loss_with_changing_metrics", micro_batch_tokens=40)
    trainer = Trainer(trainable_model(), run, RankGroup())
    trainer.start_stage("rl")
    with pytest.raises(UnusableInput, match=r"learner\.loss: a micro batch has the metrics metric_"):
        trainer.run_rl_step(rows(0))
