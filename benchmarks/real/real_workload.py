"""The model, batches and lengths of benchmarks.real, its prompts, and its training sequences."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.learner.batches.training_sequence import TrainingSequence, build_training_sequence

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RealWorkload(NamedTuple):
    """The model and the sizes that all parts measure."""

    model: Path
    config: DecoderConfig
    dtype: str
    threads: int
    repeats: int
    compiles: bool = False  # train with compiled layers
    batches: tuple[int, ...] = (1, 16, 64)
    prompt_tokens: int = 160
    new_tokens: int = 48
    groups: int = 4  # prompts of a training step
    rollouts: int = 8  # sequences of a prompt
    most_response_tokens: int = 240
    micro_batch_tokens: int = 2048

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def sequence_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens


def draw_prompts(work: RealWorkload, batch: int, seed: int) -> NDArray[np.int32]:
    """Draw prompts [B, T]. Each repeat has a seed of its own, so that no engine finds prompts in its cache."""
    draws = np.random.default_rng([batch, seed])
    return draws.integers(0, work.config.vocab_size, (batch, work.prompt_tokens), dtype=np.int32)


def draw_training_sequences(work: RealWorkload, seed: int) -> list[TrainingSequence]:
    """Draw the rollouts of a step. Those of a group share their prompt; all response tokens are in the loss."""
    draws, vocabulary = np.random.default_rng(seed), work.config.vocab_size
    sequences: list[TrainingSequence] = []
    for group in range(work.groups):
        prompt = draws.integers(0, vocabulary, work.prompt_tokens, dtype=np.int32)
        lengths = draws.integers(work.new_tokens, work.most_response_tokens, work.rollouts, endpoint=True)
        for length in lengths.tolist():
            response = draws.integers(0, vocabulary, length, dtype=np.int32)
            token_ids = np.concatenate([prompt, response])
            mask = np.arange(len(token_ids)) >= work.prompt_tokens
            logprobs = np.full(len(token_ids), -np.log(vocabulary), np.float32)
            trajectory = len(sequences)
            sequences.append(
                build_training_sequence(token_ids, mask, logprobs, float(draws.normal()), group, trajectory)
            )
    return sequences
