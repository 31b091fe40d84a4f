"""Plug-in losses, written as a user writes them."""

import torch

from asterism.policies.losses.policy_loss import LossInput, LossOutput


def compute_gspo_loss(batch: LossInput) -> LossOutput:
    """Compute GSPO's loss (arXiv 2507.18071, equations 5 and 7). A sequence's ratio uses its mean log probability."""
    ratios_S = batch.mean_by_sequence(batch.logprobs_N - batch.old_logprobs_N).exp()
    clipped_S = ratios_S.clamp(1 - batch.clip_low, 1 + batch.clip_high)
    objectives_S = torch.minimum(ratios_S * batch.advantages_S, clipped_S * batch.advantages_S)
    is_clipped_S = objectives_S < ratios_S * batch.advantages_S
    loss = -objectives_S.sum() / batch.minibatch_sequences
    return LossOutput(loss, sequence_means={"clipped_sequences": is_clipped_S.sum().float()})


def compute_dr_grpo_loss(batch: LossInput) -> LossOutput:
    """Compute Dr. GRPO's loss (arXiv 2503.20783, section 3.2): the sum over tokens is divided by a constant."""
    ratios_N = (batch.logprobs_N - batch.old_logprobs_N).exp()
    clipped_N = ratios_N.clamp(1 - batch.clip_low, 1 + batch.clip_high)
    objectives_N = torch.minimum(ratios_N * batch.advantages_N, clipped_N * batch.advantages_N)
    return LossOutput(-objectives_N.sum() / (batch.minibatch_sequences * batch.max_response_tokens))


def compute_loss_with_changing_metrics(batch: LossInput) -> LossOutput:
    name = f"metric_{len(batch.logprobs_N)}"
    return LossOutput(batch.logprobs_N.sum(), token_means={name: torch.zeros(())})
