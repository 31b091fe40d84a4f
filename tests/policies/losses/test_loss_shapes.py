"""Losses, means and corrections of minibatches of any shape agree with plain loops in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asterism.configs.schema.learner_config import LearnerConfig
from asterism.engine.learner.batches.minibatches import compute_token_weights
from asterism.engine.learner.batches.training_sequence import build_training_sequence
from asterism.policies.losses.policy_objective import PolicyObjective
from tests.engine.learner.learner_settings import make_learner
from tests.engine.learner.loss_reference import ReferenceSequence, compute_reference_loss
from tests.policies.losses.loss_inputs import build_sequences_input

MAX_TOKENS = 7
LEARNERS = [
    make_learner(function=loss, mean=mean, old_logprobs="recomputed", correction=correction, clip_dual=clip_dual)  # pyright: ignore[reportArgumentType]
    for loss, means in (
        ("grpo", ("tokens", "group", "sequence", "constant")),
        ("gspo", ("sequence",)),
        ("cispo", ("tokens", "group")),
    )
    for mean in means
    for correction, clip_dual in (("none", 0.0), ("none", 3.0), ("tis", 0.0), ("icepop", 0.0), ("decoupled", 0.0))
]


class Minibatch:
    """A minibatch of sequences with these lengths (0 is possible) in these groups."""

    def __init__(self, lengths: list[int], groups: list[int], seed: int) -> None:
        draws = np.random.default_rng(seed)
        self.lengths, self.groups = lengths, groups
        self.leaves = [
            torch.tensor(draws.uniform(-4, 0, length), dtype=torch.float64, requires_grad=True) for length in lengths
        ]
        self.behaviour = [draws.uniform(-4, 0, length) for length in lengths]
        self.old = [draws.uniform(-4, 0, length) for length in lengths]
        self.advantages = draws.normal(0, 1, len(lengths)).tolist()

    def compute(self, learner: LearnerConfig) -> Tensor:
        ones = [np.ones(length + 1, np.bool_) for length in self.lengths]  # the first token is never in the loss
        sequences = [
            build_training_sequence(mask.astype(np.int32), mask, mask.astype(np.float32), 1.0, group)
            for mask, group in zip(ones, self.groups, strict=True)
        ]
        weights = compute_token_weights(sequences, learner.loss.mean, MAX_TOKENS)
        behaviour, old_N = list(map(torch.from_numpy, self.behaviour)), torch.from_numpy(np.concatenate(self.old))
        settings = {"old_logprobs_N": old_N, "clip_dual": learner.loss.clip_dual}
        batch = build_sequences_input(self.leaves, behaviour, self.advantages, weights, **settings)
        return PolicyObjective(learner).compute(batch, None).loss

    def compute_reference(self, learner: LearnerConfig) -> Tensor:
        parts: Any = zip(self.leaves, self.behaviour, self.old, self.advantages, self.groups, strict=True)
        return compute_reference_loss([ReferenceSequence(*part) for part in parts], learner, MAX_TOKENS)

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(loss, self.leaves, allow_unused=True, materialize_grads=True)
        return tuple(found)


@given(
    st.lists(st.tuples(st.integers(0, MAX_TOKENS), st.integers(0, 3)), min_size=1, max_size=8).filter(
        lambda sequences: any(length for length, _ in sequences)
    ),
    st.integers(0, 2**32),
    st.sampled_from(LEARNERS),
)
def test_value_and_gradient_equal_plain_loops_for_any_shape(
    sequences: list[tuple[int, int]], seed: int, learner: LearnerConfig
) -> None:
    minibatch = Minibatch([length for length, _ in sequences], [group for _, group in sequences], seed)
    loss, expected = minibatch.compute(learner), minibatch.compute_reference(learner)
    assert loss.item() == pytest.approx(expected.item(), rel=0, abs=1e-10)
    torch.testing.assert_close(minibatch.gradients(loss), minibatch.gradients(expected), rtol=0, atol=1e-10)
