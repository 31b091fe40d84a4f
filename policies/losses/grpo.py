"""The built-in losses: GRPO with an asymmetric clip, GSPO, CISPO, and the cross entropy of the cold start.

Each loss is a mean over tokens (`learner.loss.mean`) with importance weights (`learner.loss.correction`).
"""

import torch
from torch import Tensor

from asterism.policies.losses.policy_loss import LossInput, LossOutput


def compute_grpo_loss(batch: LossInput) -> LossOutput:
    """Compute -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); for A < 0 at most -clip_dual A.

    r is the ratio of a token's current and old probability.

    Source: rStar2-Agent, arXiv 2508.20722, section 3; the wider upper bound: DAPO, arXiv 2503.14476,
    section 3.1; dual clip: arXiv 1912.09729. Dr. GRPO (arXiv 2503.20783, section 3.2) is this
    loss with learner.loss.mean = "constant" and rl.advantage_estimator = "dr_grpo".
    """
    return _compute_clipped_loss(batch, batch.log_ratios_N.exp())


def compute_gspo_loss(batch: LossInput) -> LossOutput:
    """Compute GRPO with one ratio per sequence: the geometric mean of the ratios of the sequence's tokens.

    The paper averages over sequences: learner.loss.mean = "sequence".

    Source: GSPO, arXiv 2507.18071, equations 5 and 7.
    """
    ratios_S = batch.mean_by_sequence(batch.log_ratios_N).exp()
    return _compute_clipped_loss(batch, ratios_S.index_select(0, batch.sequences_N))


def compute_cispo_loss(batch: LossInput) -> LossOutput:
    """Compute -clip(r, 1 - clip_low, 1 + clip_high) A log p, with no gradient through the ratio r.

    Source: CISPO, arXiv 2506.13585 (MiniMax-M1), section 3.1. The paper has no lower bound: clip_low = 1.
    """
    with torch.no_grad():
        ratios_N = batch.log_ratios_N.exp()
        clipped_N = ratios_N.clamp(1.0 - batch.clip_low, 1.0 + batch.clip_high)
    loss = -batch.corrected_mean(clipped_N * batch.advantages_N * batch.logprobs_N)
    return LossOutput(loss, token_means={"clip_fraction": (clipped_N != ratios_N).sum().float()})


def _compute_clipped_loss(batch: LossInput, ratios_N: Tensor) -> LossOutput:
    """The metric `clip_fraction` is the share of tokens without a gradient because of the clip."""
    advantages_N = batch.advantages_N
    unclipped_N = ratios_N * advantages_N
    clipped_N = ratios_N.clamp(1.0 - batch.clip_low, 1.0 + batch.clip_high) * advantages_N
    objectives_N = torch.minimum(unclipped_N, clipped_N)
    is_clipped_N = clipped_N < unclipped_N
    if batch.clip_dual:
        bounds_N = batch.clip_dual * advantages_N
        is_bounded_N = (advantages_N < 0) & (objectives_N < bounds_N)
        objectives_N = torch.where(is_bounded_N, bounds_N, objectives_N)
        is_clipped_N = is_clipped_N | is_bounded_N
    loss = -batch.corrected_mean(objectives_N)
    return LossOutput(loss, token_means={"clip_fraction": is_clipped_N.sum().float()})


def compute_sft_loss(batch: LossInput) -> LossOutput:
    """Compute the cross entropy, averaged over the minibatch's loss tokens."""
    return LossOutput(-batch.logprobs_N.sum() / batch.minibatch_tokens)
