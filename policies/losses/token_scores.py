"""Log probabilities and entropies of the loss tokens, in chunks that bound the memory of the logits.

Shapes: N loss tokens of a micro batch, C of a chunk, E hidden size, V vocabulary.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

LOGITS_CHUNK_BYTES = 768 << 20  # more logits are computed in chunks, and recomputed in the backward pass
_BYTES_PER_LOGIT = 12  # log probability, probability and its gradient, in float32


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
    hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, temperature: float = 1.0, *, entropy_gradient: bool = False
) -> TokenScores:
    """Targets under softmax(hidden @ weight.T / temperature), in float32 or wider.

    A chunk needs at most about LOGITS_CHUNK_BYTES. The gradient of the weight is summed over chunks in float32.
    """
    options = _ScoreOptions(temperature, entropy_gradient, count_chunk_tokens(len(weight_VE)))
    return TokenScores(*_Scores.apply(hidden_NE, weight_VE, targets_N, options))  # pyright: ignore[reportGeneralTypeIssues]


def count_chunk_tokens(vocab_size: int) -> int:
    return max(1, LOGITS_CHUNK_BYTES // (_BYTES_PER_LOGIT * vocab_size))


class _ScoreOptions(NamedTuple):
    temperature: float
    entropy_gradient: bool
    chunk_tokens: int

    def list_chunks(self, num_tokens: int) -> list[slice]:
        return [slice(*ends) for ends in pairwise([*range(0, num_tokens, self.chunk_tokens), num_tokens])]


class _Scores(Function):
    """Saves the log probabilities of a single chunk; those of several chunks are recomputed."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, options: _ScoreOptions
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden_NE.dtype, torch.float32)
        logprobs_N = hidden_NE.new_zeros(len(targets_N), dtype=exact)
        entropies_N = torch.zeros_like(logprobs_N)
        chunks = options.list_chunks(len(targets_N))
        log_p_CV = None
        for chunk in chunks:
            log_p_CV = _compute_log_p(hidden_NE[chunk], weight_VE, options.temperature)
            torch.gather(log_p_CV, -1, targets_N[chunk, None], out=logprobs_N[chunk, None])
            torch.linalg.vecdot(log_p_CV.exp(), log_p_CV, out=entropies_N[chunk]).neg_()
        kept = log_p_CV if len(chunks) == 1 else None
        ctx.save_for_backward(hidden_NE, weight_VE, targets_N, entropies_N, kept)
        ctx.options = options
        if not options.entropy_gradient:
            ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients_N: Any) -> Any:
        hidden_NE, weight_VE, targets_N, entropies_N, kept = ctx.saved_tensors
        options: _ScoreOptions = ctx.options
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.zeros_like(hidden_NE) if needs_hidden else None
        weight_gradient = torch.zeros_like(weight_VE, dtype=entropies_N.dtype) if needs_weight else None
        for chunk in options.list_chunks(len(targets_N)):
            hidden_CE = hidden_NE[chunk]
            log_p_CV = _compute_log_p(hidden_CE, weight_VE, options.temperature) if kept is None else kept
            gradients_C = gradients_N[0][chunk], gradients_N[1][chunk] if options.entropy_gradient else None
            gradient_CV = _differentiate(log_p_CV, targets_N[chunk], entropies_N[chunk], *gradients_C)
            gradient_CV = gradient_CV.div_(options.temperature).to(hidden_NE.dtype)
            del log_p_CV
            if hidden_gradient is not None:
                torch.mm(gradient_CV, weight_VE, out=hidden_gradient[chunk])
            if weight_gradient is not None:
                _add_product(weight_gradient, gradient_CV.t(), hidden_CE)
        return hidden_gradient, weight_gradient, None, None


def _compute_log_p(hidden_CE: Tensor, weight_VE: Tensor, temperature: float) -> Tensor:
    logits_CV = hidden_CE @ weight_VE.t()
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return torch.log_softmax(logits_CV if temperature == 1.0 else logits_CV.div_(temperature), dim=-1)


def _differentiate(
    log_p_CV: Tensor, targets_C: Tensor, entropies_C: Tensor, logprob_gradients_C: Tensor, entropy_gradients_C: Any
) -> Tensor:
    """With respect to logits / temperature: (1[target] - p) for log p, and -p (log p + entropy) for the entropy."""
    gradient_CV = log_p_CV.exp()
    if entropy_gradients_C is None:
        gradient_CV.mul_(-logprob_gradients_C[:, None])
    else:
        factors_CV = (log_p_CV + entropies_C[:, None]).mul_(entropy_gradients_C[:, None])
        gradient_CV.mul_(factors_CV.add_(logprob_gradients_C[:, None])).neg_()
    return gradient_CV.scatter_add_(-1, targets_C[:, None], logprob_gradients_C[:, None])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
