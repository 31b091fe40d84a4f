"""Log probabilities and entropies of the loss tokens, in chunks that bound the memory of the logits.

Shapes: N loss tokens of a micro batch, C tokens of a chunk, G tokens of a group of chunks, E hidden size, V vocabulary.

The backward pass recomputes the logits of a chunk and writes their gradient. It multiplies the gradient with the output
matrix and with the hidden states once for a group of chunks, because each product with the hidden states is added to a
float32 gradient of the whole matrix.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from asterism.policies.losses.head_kernels import (
    EagerHeadKernels,
    HeadKernels,
    ScoredChunk,
    add_weight_gradient,
    compute_logits,
)
from asterism.policies.losses.logits_chunks import count_chunk_tokens, count_group_tokens

EAGER_KERNELS = EagerHeadKernels()


class ScoredTokens(NamedTuple):
    """The tokens of a micro batch to score, and the options of their distribution."""

    positions_N: Tensor  # int64, indices into the flattened [B * T] of the hidden states that predict the tokens
    targets_N: Tensor  # int64
    temperature: float = 1.0  # sampling temperature
    entropy_gradient: bool = False
    float32_logits: bool = True  # learner.head_dtype; only for hidden states of 16 bits


class TokenScores(NamedTuple):
    logprobs_N: Tensor  # log p of each target, with gradient
    entropies_N: Tensor  # nats; with gradient only on request


class _HeadOptions(NamedTuple):
    temperature: float
    entropy_gradient: bool
    float32_logits: bool
    kernels: HeadKernels
    chunk_tokens: int
    group_tokens: int  # a multiple of `chunk_tokens`

    def list_chunks(self, first: int, end: int) -> Iterator[slice]:
        return _cut(first, end, self.chunk_tokens)

    def list_groups(self, num_tokens: int) -> Iterator[slice]:
        return _cut(0, num_tokens, self.group_tokens)


def compute_token_scores(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    targets_N: Tensor,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
    float32_logits: bool = True,
    kernels: HeadKernels = EAGER_KERNELS,
) -> TokenScores:
    """Score the targets under softmax(hidden @ weight.T / temperature), in float32 or wider.

    The products read `weight_VE` in the dtype of the hidden states. A float32 weight receives a float32 gradient.
    """
    chunk_tokens = count_chunk_tokens(len(weight_VE), kernels.memory)
    group_tokens = count_group_tokens(len(weight_VE), chunk_tokens) if hidden_NE.is_cuda else chunk_tokens
    options = _HeadOptions(temperature, entropy_gradient, float32_logits, kernels, chunk_tokens, group_tokens)
    return TokenScores(*_Scores.apply(hidden_NE, weight_VE, targets_N, options))  # pyright: ignore[reportGeneralTypeIssues]


def _cut(first: int, end: int, size: int) -> Iterator[slice]:
    return (slice(*ends) for ends in pairwise([*range(first, end, size), end]))


class _HeadInputs(NamedTuple):
    hidden_NE: Tensor
    used_VE: Tensor  # the output matrix in the dtype of the hidden states
    targets_N: Tensor
    options: _HeadOptions

    def compute_logits(self, chunk: slice) -> Tensor:
        return compute_logits(self.hidden_NE[chunk], self.used_VE, float32_logits=self.options.float32_logits)


class _TokenSums(NamedTuple):
    """The results of the forward pass for each token."""

    logprobs_N: Tensor
    entropies_N: Tensor
    log_sums_N: Tensor


def _score_chunk(inputs: _HeadInputs, chunk: slice, sums: _TokenSums) -> Tensor | None:
    """Write the chunk's rows of `sums`. Return the log probabilities [C, V] if the kernels compute them and the micro
    batch is one chunk; otherwise they are freed before the next chunk.
    """
    scores = inputs.options.kernels.score(
        inputs.compute_logits(chunk), inputs.targets_N[chunk], inputs.options.temperature
    )
    sums.logprobs_N[chunk], sums.entropies_N[chunk] = scores.logprobs_C, scores.entropies_C
    sums.log_sums_N[chunk] = scores.log_sums_C
    return scores.log_p_CV if chunk == slice(0, len(inputs.targets_N)) else None


def _collect_chunk(
    inputs: _HeadInputs,
    chunk: slice,
    log_sums_N: Tensor,
    entropies_N: Tensor,
    kept_CV: Tensor | None,
    gradients_N: Sequence[Tensor],
) -> ScoredChunk:
    """Recompute the chunk's logits unless its log probabilities were kept. `gradients_N`: one tensor per output."""
    return ScoredChunk(
        inputs.compute_logits(chunk) if kept_CV is None else kept_CV,
        inputs.targets_N[chunk],
        inputs.options.temperature,
        log_sums_N[chunk],
        entropies_N[chunk],
        kept_CV,
        gradients_N[0][chunk],
        gradients_N[1][chunk] if inputs.options.entropy_gradient else None,
    )


class _Scores(Function):
    """Saves the log probabilities of a single chunk if the kernels compute them, and recomputes other logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, options: _HeadOptions
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden_NE.dtype, torch.float32)
        logprobs_N = hidden_NE.new_zeros(len(targets_N), dtype=exact)
        sums = _TokenSums(logprobs_N, torch.zeros_like(logprobs_N), torch.zeros_like(logprobs_N))
        inputs, kept_CV = _HeadInputs(hidden_NE, weight_VE.to(hidden_NE.dtype), targets_N, options), None
        for chunk in options.list_chunks(0, len(targets_N)):
            kept_CV = _score_chunk(inputs, chunk, sums)
        ctx.save_for_backward(hidden_NE, weight_VE, targets_N, sums.entropies_N, sums.log_sums_N, kept_CV)
        ctx.options = options
        if not options.entropy_gradient:
            ctx.mark_non_differentiable(sums.entropies_N)
        return sums.logprobs_N, sums.entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients_N: Any) -> Any:
        hidden_NE, weight_VE, targets_N, entropies_N, log_sums_N, kept_CV = ctx.saved_tensors
        options: _HeadOptions = ctx.options
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.zeros_like(hidden_NE) if needs_hidden else None
        inputs, weight_gradient = _HeadInputs(hidden_NE, weight_VE.to(hidden_NE.dtype), targets_N, options), None
        buffer_GV = hidden_NE.new_empty(min(options.group_tokens, len(targets_N)), len(weight_VE))
        for group in options.list_groups(len(targets_N)):
            gradient_GV = buffer_GV[: group.stop - group.start]
            for chunk in options.list_chunks(group.start, group.stop):
                options.kernels.differentiate(
                    _collect_chunk(inputs, chunk, log_sums_N, entropies_N, kept_CV, gradients_N),
                    gradient_GV[chunk.start - group.start : chunk.stop - group.start],
                )
            if hidden_gradient is not None:
                torch.mm(gradient_GV, inputs.used_VE, out=hidden_gradient[group])
            if needs_weight:
                weight_gradient = add_weight_gradient(weight_gradient, gradient_GV, hidden_NE[group])
        if needs_weight and weight_gradient is None:  # without tokens
            weight_gradient = torch.zeros_like(weight_VE)
        return hidden_gradient, weight_gradient, None, None
