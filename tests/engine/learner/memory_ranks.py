"""Measures the memory of real learner steps on all ranks."""

import gc
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.learner.batches.training_sequence import TrainingSequence, build_training_sequence
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.sharding import shard_model
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.learner.rank_probes import measuring_memory
from tests.engine.learner.training_examples import rl_sequences, small_run, trainable_model


class MemoryCase(msgspec.Struct, frozen=True):
    model: dict[str, Any]  # fields of config.json
    learner: dict[str, Any]  # settings of [learner]
    sequence_tokens: int  # tokens in each sequence; only the first token is not in the loss
    num_sequences: int


class StepMemory(msgspec.Struct, frozen=True):
    """The growth of anonymous memory, counted from before the creation of the model."""

    model_bytes: int  # growth after loading the model
    peak_bytes: int  # largest growth during two steps


def make_sequences(case: MemoryCase, vocab_size: int, tokens: int) -> list[TrainingSequence]:
    draws, length = np.random.default_rng(0), tokens + 1  # the last token is predicted but is no input
    mask = np.arange(length) > 0
    return [
        build_training_sequence(
            draws.integers(0, vocab_size, length, dtype=np.int32),
            mask,
            np.full(length, -8.0, np.float32),
            float(draws.normal()),
            number,
            number,
        )
        for number in range(case.num_sequences)
    ]


def warm_up(ranks: RankGroup, learner: dict[str, Any]) -> None:
    """Run a small step, so that torch and gloo allocate what they allocate once per process."""
    model = trainable_model()
    shard_model(model, ranks, learner.get("dtype", "float32"))
    Trainer(model, small_run(**learner), ranks).run_rl_step(rl_sequences(1))


@torch.no_grad()
def fill_randomly(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        _ = local.fill_(1.0) if local.dim() == 1 else local.normal_(0.0, 0.02)


def measure(ranks: RankGroup, case: MemoryCase) -> StepMemory:
    warm_up(ranks, case.learner)
    gc.collect()
    config = DecoderConfig.from_hf(case.model)
    run = small_run(**case.learner)
    # The first step creates the optimizer's state. The second step has the peak of memory.
    steps = [make_sequences(case, config.vocab_size, tokens) for tokens in (4, case.sequence_tokens)]
    with measuring_memory() as peak:
        with torch.device("meta"):
            model = CausalLM(config)
        shard_model(model, ranks, run.learner.dtype)
        model.to_empty(device="cpu")
        fill_randomly(model)
        peak.update()
        model_bytes = peak.growth
        trainer = Trainer(model, run, ranks)
        trainer.start_stage("rl")
        for sequences in steps:
            trainer.run_rl_step(sequences)
    return StepMemory(model_bytes, peak.growth)
