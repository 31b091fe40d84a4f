"""The mismatch between engine and learner: importance weights that correct it, metrics, and a limit.

The engine samples a token with the probability mu; the learner computes pi_old for the same weights. Different kernels,
batches or dtypes make mu and pi_old differ. w = pi_old / mu is a token's importance weight. Shapes: N loss tokens.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from asterism.configs.schema.learner_config import LearnerConfig
from asterism.policies.losses.policy_loss import LossOutput, max_or_zero

LARGE_DIFFERENCE = 1.0  # nats
CONFIDENT_PROBABILITY = 0.5  # least probability in the engine of a confident token
CONFIDENT_DIFFERENCE = 2.0  # nats by which the learner's log probability of such a token is smaller
SHARE_BEYOND_LARGE = "mismatch_above_1"


class Correction(NamedTuple):
    """Importance weights and masks, all without gradient."""

    weights_N: Tensor
    is_masked_N: Tensor  # bool: excluded from the loss
    is_truncated_N: Tensor  # bool: the weight was lowered


def compute_correction(old_logprobs_N: Tensor, behaviour_logprobs_N: Tensor, learner: LearnerConfig) -> Correction:
    """Compute importance weights by `learner.loss.correction`, within learner.loss.correction_low and correction_high:

    tis        min(w, high). Source: truncated importance sampling, Ionides 2008; for engines of language models:
               Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025
    icepop     w if low <= w <= high, else 0. Source: IcePop, arXiv 2510.18855
    decoupled  w if w <= high, else 0. Source: decoupled PPO, arXiv 2110.00641; for language models: AReaL,
               arXiv 2505.24298; the bound is that of AReaL's code
    """
    kind = learner.loss.correction
    ones_N = torch.ones_like(old_logprobs_N)
    none_N = torch.zeros_like(old_logprobs_N, dtype=torch.bool)
    if kind == "none":
        return Correction(ones_N, none_N, none_N)
    limit = learner.loss.log_ratio_limit
    weights_N = (old_logprobs_N - behaviour_logprobs_N).detach().clamp(-limit, limit).exp()
    is_above_N = weights_N > learner.loss.correction_high
    if kind == "tis":
        return Correction(weights_N.clamp(max=learner.loss.correction_high), none_N, is_above_N)
    is_below_N = weights_N < learner.loss.correction_low if kind == "icepop" else none_N
    is_masked_N = is_above_N | is_below_N
    return Correction(weights_N.masked_fill(is_masked_N, 0.0), is_masked_N, none_N)


def compute_mismatch_metrics(logprobs_N: Tensor, behaviour_logprobs_N: Tensor, correction: Correction) -> LossOutput:
    """Compute metrics of d = log pi - log mu in nats, before any clamp or mask, over tokens sampled from mu.

    k1 = mean(-d) and k3 = mean(exp(d) - 1 - d) estimate KL(mu | pi). Source: Schulman, "Approximating KL
    divergence", 2020. The tails are the negative lowest d and the highest d. A NaN counts as a large d.
    """
    with torch.no_grad():
        # In float64, exp(d) is finite up to 709 nats.
        differences_N = (logprobs_N - behaviour_logprobs_N).to(torch.float64)
        distances_N = differences_N.abs()
        means = {
            "mismatch": distances_N.sum(),
            "mismatch_k1": -differences_N.sum(),
            "mismatch_k3": (torch.expm1(differences_N) - differences_N).sum(),
            "mismatch_above_0.2": (~(distances_N <= 0.2)).sum(),
            SHARE_BEYOND_LARGE: (~(distances_N <= LARGE_DIFFERENCE)).sum(),
            "mismatch_confident": _find_confident(behaviour_logprobs_N, differences_N).sum(),
            "correction_masked": correction.is_masked_N.sum(),
            "correction_truncated": correction.is_truncated_N.sum(),
        }
        tails = {
            "mismatch_max": max_or_zero(distances_N),
            "mismatch_lowest": max_or_zero(-differences_N),
            "mismatch_highest": max_or_zero(differences_N),
        }
        as_float64 = {name: value.to(torch.float64) for name, value in means.items()}
        return LossOutput(differences_N.new_zeros(()), token_means=as_float64, maxima=tails)


def _find_confident(behaviour_logprobs_N: Tensor, differences_N: Tensor) -> Tensor:
    """Return bool [N]: tokens likely in the engine and unlikely in the learner. Means over all tokens hide them."""
    is_likely_N = behaviour_logprobs_N >= math.log(CONFIDENT_PROBABILITY)
    return is_likely_N & ~(differences_N >= -CONFIDENT_DIFFERENCE)


def describe_excessive_mismatch(metrics: Mapping[str, float], limit: float) -> str | None:
    """Return a message if a minibatch exceeds learner.loss.mismatch_limit, or None if not, or if there is no limit."""
    share = metrics[SHARE_BEYOND_LARGE]
    if not limit or share <= limit:
        return None
    return (
        f"learner.loss.mismatch_limit: the log probabilities of engine and learner differ by more than {LARGE_DIFFERENCE:g} "
        f"nat for {share:.1%} of the tokens of a minibatch (limit {limit:.1%}; k3 KL {metrics['mismatch_k3']:.3g} nats, "
        f"largest difference {metrics['mismatch_max']:.3g}). Likely causes: the engine has other weights than the "
        "learner; sampling.temperature, top_p or top_k is not the one that the engine used; the server quantizes or "
        "changes logits; the model's architecture differs between them. This minibatch was not trained on."
    )
