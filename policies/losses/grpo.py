"""The SFT and GRPO losses, over the tokens that the model generated.

Shapes: N loss tokens of a micro batch, C of a chunk, E hidden size, V vocabulary. Each loss is a
sum over the micro batch divided by the token count of the minibatch, so that the losses of micro
batches and ranks add up.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Elements; more logits are computed in chunks, and recomputed in the backward pass.
MAX_LOGITS_PER_CHUNK = 1 << 25


class TokenScores(NamedTuple):
    logprobs_N: Tensor  # log p of each target, with gradient
    entropies_N: Tensor  # nats, without gradient


Scalar = TypeVar("Scalar", Tensor, float)


class GrpoSums(NamedTuple, Generic[Scalar]):
    """Sums over tokens; they add up over micro batches and ranks."""

    loss: Scalar  # divided by the minibatch's tokens
    clipped: Scalar  # tokens without a gradient because of clipping
    ratio: Scalar
    log_difference: Scalar  # |recomputed - behaviour log probability|
    entropy: Scalar


class GrpoPeaks(NamedTuple, Generic[Scalar]):
    """Maxima over tokens, micro batches and ranks."""

    ratio: Scalar
    log_difference: Scalar


def compute_token_scores(
    hidden_NE: Tensor,
    targets_N: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    temperature: float = 1.0,
) -> TokenScores:
    """Targets under softmax(logits / temperature), in chunks of about MAX_LOGITS_PER_CHUNK."""

    def score(hidden_CE: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = compute_logits(hidden_CE).float()
        log_p_CV = torch.log_softmax(logits_CV if temperature == 1.0 else logits_CV / temperature, dim=-1)
        logprobs_C = log_p_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            entropies_C = -torch.linalg.vecdot(log_p_CV.exp(), log_p_CV)
        return logprobs_C, entropies_C

    chunk = max(1, MAX_LOGITS_PER_CHUNK // vocab_size)
    if len(targets_N) <= chunk:
        return TokenScores(*score(hidden_NE, targets_N))
    pairs = zip(hidden_NE.split(chunk), targets_N.split(chunk), strict=True)
    parts = [checkpoint(score, hidden_CE, targets_C, use_reentrant=False) for hidden_CE, targets_C in pairs]
    return TokenScores(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))


def sft_loss(scores: TokenScores, minibatch_tokens: int) -> Tensor:
    """Cross entropy, averaged over the minibatch's loss tokens."""
    return -scores.logprobs_N.sum() / minibatch_tokens


def grpo_loss(
    scores: TokenScores,
    behaviour_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    minibatch_tokens: int,
) -> tuple[GrpoSums[Tensor], GrpoPeaks[Tensor]]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), averaged over the minibatch's loss
    tokens.

    r is the ratio of a token's current and behaviour probability. No KL term and no entropy bonus.

    Source: rStar2-Agent, arXiv 2508.20722, section 3; the wider upper bound and the token mean:
    DAPO, arXiv 2503.14476.
    """
    differences_N = scores.logprobs_N - behaviour_logprobs_N
    ratios_N = differences_N.exp()
    unclipped_N = ratios_N * advantages_N
    clipped_N = ratios_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_N
    loss = -torch.minimum(unclipped_N, clipped_N).sum() / minibatch_tokens
    with torch.no_grad():
        clipped = (clipped_N < unclipped_N).sum().float()
        distances_N = differences_N.abs()
        sums = GrpoSums(loss, clipped, ratios_N.sum(), distances_N.sum(), scores.entropies_N.sum())
        return sums, GrpoPeaks(_max_or_zero(ratios_N), _max_or_zero(distances_N))


def _max_or_zero(values_N: Tensor) -> Tensor:
    return values_N.detach().max() if len(values_N) else values_N.new_zeros(())
