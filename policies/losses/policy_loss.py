"""The interface of losses: a function from a micro batch's log probabilities to a loss and named metrics.

Shapes: N loss tokens of a micro batch, S of its sequences. A micro batch contains whole sequences, and may be empty.
A loss is a sum over the micro batch, divided by a total of the minibatch, so that the losses of all micro batches and
ranks add up to the loss of the minibatch. docs/losses.md has an example.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class LossInput(NamedTuple):
    logprobs_N: Tensor  # of the trained policy, with gradient
    behaviour_logprobs_N: Tensor  # of the policy that generated the token; zeros in the cold start
    advantages_N: Tensor
    entropies_N: Tensor  # nats, without gradient
    sequences_N: Tensor  # int64 in [0, S): the sequence of each token
    num_sequences: int  # S
    minibatch_tokens: int  # of all micro batches and ranks, at least 1
    minibatch_sequences: int  # sequences with a loss token, of all micro batches and ranks, at least 1
    max_response_tokens: int  # dialogue.response_tokens
    clip_low: float
    clip_high: float

    @property
    def advantages_S(self) -> Tensor:  # noqa: N802 - the shape is part of the name
        """Each sequence's advantage; 0 for a sequence without tokens."""
        return self.advantages_N.new_zeros(self.num_sequences).index_copy(0, self.sequences_N, self.advantages_N)

    def sum_by_sequence(self, values_N: Tensor) -> Tensor:
        """[S], with gradient."""
        return values_N.new_zeros(self.num_sequences).index_add(0, self.sequences_N, values_N)

    def mean_by_sequence(self, values_N: Tensor) -> Tensor:
        """[S], with gradient; 0 for a sequence without tokens."""
        return self.sum_by_sequence(values_N) / self.sum_by_sequence(torch.ones_like(values_N)).clamp(min=1)


class LossOutput(NamedTuple):
    """The names of the metrics must not depend on the data: every rank reduces the same ones."""

    loss: Tensor  # scalar
    token_means: Mapping[str, Tensor] = {}  # metric -> its sum over the tokens
    sequence_means: Mapping[str, Tensor] = {}  # metric -> its sum over the sequences
    maxima: Mapping[str, Tensor] = {}


PolicyLoss = Callable[[LossInput], LossOutput]


def compute_policy_metrics(batch: LossInput) -> LossOutput:
    """Metrics of any loss: ratio and entropy, and the mismatch |log p recomputed - log p of the engine|."""
    with torch.no_grad():
        differences_N = batch.logprobs_N - batch.behaviour_logprobs_N
        ratios_N, distances_N = differences_N.exp(), differences_N.abs()
        means = {"ratio": ratios_N.sum(), "mismatch": distances_N.sum(), "entropy": batch.entropies_N.sum()}
        maxima = {"ratio_max": max_or_zero(ratios_N), "mismatch_max": max_or_zero(distances_N)}
        return LossOutput(batch.entropies_N.new_zeros(()), token_means=means, maxima=maxima)


def max_or_zero(values: Tensor) -> Tensor:
    return values.detach().max() if len(values) else values.new_zeros(())
