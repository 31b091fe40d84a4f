"""Log probabilities and entropies of the loss tokens, in chunks that bound the memory of the logits.

Shapes: N loss tokens of a micro batch, C of a chunk, E hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Elements; more logits are computed in chunks, and recomputed in the backward pass.
MAX_LOGITS_PER_CHUNK = 1 << 25


class ScoredTokens(NamedTuple):
    """Which tokens of a micro batch to score, and under which distribution."""

    positions_N: Tensor  # int64, indices into the flattened [B * T] of the hidden states that predict the tokens
    targets_N: Tensor  # int64
    temperature: float = 1.0  # of sampling
    entropy_gradient: bool = False


class TokenScores(NamedTuple):
    logprobs_N: Tensor  # log p of each target, with gradient
    entropies_N: Tensor  # nats; with gradient only on request


def compute_token_scores(
    hidden_NE: Tensor,
    targets_N: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Targets under softmax(logits / temperature), in float32 or wider, in chunks of about MAX_LOGITS_PER_CHUNK."""

    def score(hidden_CE: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = compute_logits(hidden_CE)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        log_p_CV = torch.log_softmax(logits_CV if temperature == 1.0 else logits_CV / temperature, dim=-1)
        logprobs_C = log_p_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies_C = -torch.linalg.vecdot(log_p_CV.exp(), log_p_CV)
        return logprobs_C, entropies_C

    chunk = max(1, MAX_LOGITS_PER_CHUNK // vocab_size)
    if len(targets_N) <= chunk:
        parts = [score(hidden_NE, targets_N)]
    else:
        pairs = zip(hidden_NE.split(chunk), targets_N.split(chunk), strict=True)
        parts = [checkpoint(score, hidden_CE, targets_C, use_reentrant=False) for hidden_CE, targets_C in pairs]
    # Copies one part, too: FSDP does not gather for the backward pass of a view that is changed in place.
    return TokenScores(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))
