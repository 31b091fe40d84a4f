"""The interface of losses: a function from a micro batch's log probabilities to a loss and named metrics.

Shapes: N loss tokens of a micro batch, S sequences. A micro batch contains whole sequences, and may be empty. A loss is
a sum over the micro batch, divided by a total of the minibatch. So the losses of all micro batches and ranks add up to
the loss of the minibatch. docs/losses.md has an example.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class LossInput(NamedTuple):
    logprobs_N: Tensor  # of the trained policy, with gradient
    behaviour_logprobs_N: Tensor  # as the engine reported them; zeros in the cold start
    old_logprobs_N: Tensor  # denominator of the ratio: the engine's, or recomputed (learner.loss.old_logprobs)
    advantages_N: Tensor
    entropies_N: Tensor  # nats; with gradient if learner.loss.entropy_coef is positive
    sequences_N: Tensor  # int64 in [0, S): the sequence of each token
    num_sequences: int  # S
    weights_N: Tensor  # float64: share of each token in the configured mean (learner.loss.mean); the sum is 1
    corrections_N: Tensor  # importance weight of each token (learner.loss.correction); 1.0 without a correction
    minibatch_tokens: int  # loss tokens of all micro batches and ranks, at least 1
    minibatch_sequences: int  # sequences with a loss token, of all micro batches and ranks, at least 1
    max_response_tokens: int  # dialogue.response_tokens
    clip_low: float
    clip_high: float
    clip_dual: float  # 0: no dual clip
    log_ratio_limit: float

    @property
    def log_ratios_N(self) -> Tensor:  # noqa: N802 - the shape is part of the name
        """The clamped log ratio log p - log p_old; beyond +-log_ratio_limit, a token has no gradient."""
        return (self.logprobs_N - self.old_logprobs_N).clamp(-self.log_ratio_limit, self.log_ratio_limit)

    @property
    def advantages_S(self) -> Tensor:  # noqa: N802
        """Each sequence's advantage, or 0 for a sequence without tokens."""
        return self.advantages_N.new_zeros(self.num_sequences).index_copy(0, self.sequences_N, self.advantages_N)

    def mean(self, values_N: Tensor) -> Tensor:
        """Return this micro batch's part of the configured mean over the minibatch, a scalar."""
        return (values_N * self.weights_N.to(values_N.dtype)).sum()

    def corrected_mean(self, values_N: Tensor) -> Tensor:
        """Return the `mean` of the values times their importance weights."""
        return self.mean(values_N * self.corrections_N)

    def sum_by_sequence(self, values_N: Tensor) -> Tensor:
        """Return the sums [S], with gradient."""
        return values_N.new_zeros(self.num_sequences).index_add(0, self.sequences_N, values_N)

    def mean_by_sequence(self, values_N: Tensor) -> Tensor:
        """Return the means [S], with gradient, or 0 for a sequence without tokens."""
        return self.sum_by_sequence(values_N) / self.sum_by_sequence(torch.ones_like(values_N)).clamp(min=1)


class LossOutput(NamedTuple):
    """A loss and its metrics. All ranks reduce the same metrics, so their names must not depend on the data."""

    loss: Tensor  # scalar
    token_means: Mapping[str, Tensor] = {}  # metric -> its sum over the tokens
    sequence_means: Mapping[str, Tensor] = {}  # metric -> its sum over the sequences
    maxima: Mapping[str, Tensor] = {}


PolicyLoss = Callable[[LossInput], LossOutput]


def compute_policy_metrics(batch: LossInput) -> LossOutput:
    """Compute the metrics that every loss has: the ratio, clamped to log_ratio_limit, and the entropy."""
    with torch.no_grad():
        ratios_N = batch.log_ratios_N.exp()
        means = {"ratio": ratios_N.sum(), "entropy": batch.entropies_N.sum()}
        loss = batch.entropies_N.new_zeros(())
        return LossOutput(loss, token_means=means, maxima={"ratio_max": max_or_zero(ratios_N)})


def max_or_zero(values: Tensor) -> Tensor:
    return values.detach().max() if len(values) else values.new_zeros(())
