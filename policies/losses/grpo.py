"""The built-in losses: GRPO with a token mean and an asymmetric clip, and the cross entropy of the cold start."""

import torch

from policies.losses.policy_loss import LossInput, LossOutput


def compute_grpo_loss(batch: LossInput) -> LossOutput:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), averaged over the minibatch's loss
    tokens.

    r is the ratio of a token's current and behaviour probability. No KL term and no entropy bonus.

    Source: rStar2-Agent, arXiv 2508.20722, section 3; the wider upper bound and the token mean:
    DAPO, arXiv 2503.14476.
    """
    ratios_N = (batch.logprobs_N - batch.behaviour_logprobs_N).exp()
    unclipped_N = ratios_N * batch.advantages_N
    clipped_N = ratios_N.clamp(1.0 - batch.clip_low, 1.0 + batch.clip_high) * batch.advantages_N
    loss = -torch.minimum(unclipped_N, clipped_N).sum() / batch.minibatch_tokens
    # A clipped token has no gradient.
    return LossOutput(loss, token_means={"clip_fraction": (clipped_N < unclipped_N).sum().float()})


def compute_sft_loss(batch: LossInput) -> LossOutput:
    """Cross entropy, averaged over the minibatch's loss tokens."""
    return LossOutput(-batch.logprobs_N.sum() / batch.minibatch_tokens)
