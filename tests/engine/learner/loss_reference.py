"""The losses of a minibatch as plain loops over tokens in float64, after the equations of the papers."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asterism.configs.schema.learner_config import LearnerConfig


class ReferenceSequence(NamedTuple):
    logprobs: Tensor  # in float64, with gradient
    behaviour: Sequence[float]
    old: Sequence[float]  # log probabilities in the denominators of the ratios
    advantage: float
    group_id: int
    entropies: Sequence[Tensor] = ()
    reference: Sequence[float] = ()  # log probabilities of the frozen policy


def compute_reference_loss(
    sequences: Sequence[ReferenceSequence], learner: LearnerConfig, max_response_tokens: int
) -> Tensor:
    """Compute the loss. No setting in `learner` is "auto"."""
    counted = [each for each in sequences if len(each.logprobs)]
    total = 0 * torch.cat([each.logprobs for each in counted]).sum()  # has a gradient even if all tokens are clipped
    for sequence in counted:
        for t in range(len(sequence.logprobs)):
            weight = _weigh(sequence, counted, learner, max_response_tokens)
            correction = _correct(sequence.old[t] - sequence.behaviour[t], learner)
            total = total - weight * correction * _objective(sequence, t, learner)
            if learner.loss.kl_coef:
                total = total + weight * learner.loss.kl_coef * _kl(
                    sequence.logprobs[t] - sequence.reference[t], learner
                )
            if learner.loss.entropy_coef:
                total = total - weight * learner.loss.entropy_coef * sequence.entropies[t]
    return total


def _weigh(
    sequence: ReferenceSequence, counted: Sequence[ReferenceSequence], learner: LearnerConfig, max_response_tokens: int
) -> float:
    if learner.loss.mean == "tokens":
        return 1 / sum(len(each.logprobs) for each in counted)
    if learner.loss.mean == "group":
        groups = {each.group_id for each in counted}
        tokens = sum(len(each.logprobs) for each in counted if each.group_id == sequence.group_id)
        return 1 / len(groups) / tokens
    if learner.loss.mean == "sequence":
        return 1 / len(counted) / len(sequence.logprobs)
    return 1 / len(counted) / max_response_tokens


def _correct(difference: float, learner: LearnerConfig) -> float:
    w = math.exp(max(-learner.loss.log_ratio_limit, min(learner.loss.log_ratio_limit, difference)))
    if learner.loss.correction == "tis":
        return min(w, learner.loss.correction_high)
    if learner.loss.correction == "icepop":
        return w if learner.loss.correction_low <= w <= learner.loss.correction_high else 0.0
    if learner.loss.correction == "decoupled":
        return w if w <= learner.loss.correction_high else 0.0
    return 1.0


def _objective(sequence: ReferenceSequence, t: int, learner: LearnerConfig) -> Tensor:
    def log_ratio(u: int) -> Tensor:
        difference = sequence.logprobs[u] - sequence.old[u]
        limit = learner.loss.log_ratio_limit
        return (
            difference
            if abs(difference.item()) <= limit
            else torch.full_like(difference, math.copysign(limit, difference.item()))
        )

    advantage, low, high = sequence.advantage, 1 - learner.loss.clip_low, 1 + learner.loss.clip_high
    if learner.loss.function == "cispo":
        return min(max(math.exp(log_ratio(t).item()), low), high) * advantage * sequence.logprobs[t]
    if learner.loss.function == "gspo":
        ratios = [log_ratio(u) for u in range(len(sequence.logprobs))]
        ratio = torch.exp(torch.stack(ratios).sum() / len(ratios))
    else:
        ratio = torch.exp(log_ratio(t))
    clipped = ratio if low <= ratio.item() <= high else torch.full_like(ratio, low if ratio.item() < low else high)
    objective = min(ratio * advantage, clipped * advantage)
    if learner.loss.clip_dual and advantage < 0 and objective.item() < learner.loss.clip_dual * advantage:
        return torch.full_like(objective, learner.loss.clip_dual * advantage)
    return objective


def _kl(difference: Tensor, learner: LearnerConfig) -> Tensor:
    if learner.loss.kl_estimator == "k1":
        return difference
    if learner.loss.kl_estimator == "k2":
        return difference * difference / 2
    return torch.exp(-difference) - 1 + difference
