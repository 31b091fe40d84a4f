"""Losses, gradients and metrics of one minibatch in float64, for each case."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from asterism.bus.messages import TrainingSample
from asterism.engine.learner.batches.training_sequence import build_rl_sequence
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.sharding import shard_model
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.learner.training_examples import RecordingTrainer, rows, small_run, trainable_model


class LossCase(msgspec.Struct, frozen=True):
    settings: dict[str, Any]  # settings of [learner]
    micro_batch_tokens: int = 128
    reverse: bool = False  # whether the order of the rows is reversed
    dtype: str = "float64"


class LossGradients(NamedTuple):
    loss: float
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def make_rows() -> list[TrainingSample]:
    """Make two groups; the tokens' log ratios range from about -6 to +6."""
    return rows(0, groups=2, size=4)


def make_reference_model() -> CausalLM:
    """Make the frozen policy of the KL term. Its weights differ slightly from the trained policy."""
    model = trainable_model().double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def compute_gradients(ranks: RankGroup, cases: Sequence[LossCase]) -> list[LossGradients]:
    return [_compute_gradients(ranks, case) for case in cases]


def _compute_gradients(ranks: RankGroup, case: LossCase) -> LossGradients:
    torch.set_num_threads(1)
    settings = {"minibatches": 1, "micro_batch_tokens": case.micro_batch_tokens} | case.settings
    dtype = getattr(torch, case.dtype)
    model = trainable_model().to(dtype)
    shard_model(model, ranks)
    trainer = RecordingTrainer(model, small_run(**settings), ranks)
    if case.settings.get("kl_coef"):
        reference = make_reference_model().to(dtype)
        shard_model(reference, ranks)
        trainer.set_reference(reference.requires_grad_(False))
    trainer.start_stage("rl")
    sequences = [build_rl_sequence(each) for each in make_rows()]
    metrics = trainer.run_rl_step(sequences[::-1] if case.reverse else sequences)
    return LossGradients(metrics["loss"], trainer.gradients or {}, metrics)
