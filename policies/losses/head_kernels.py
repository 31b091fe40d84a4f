"""Products and pointwise functions of the output head, for one chunk of tokens.

Shapes: C tokens of a chunk, E hidden size, V vocabulary. In 16 bits, the products read 16-bit values and add in
float32. Logits are rounded to 16 bits only if `float32_logits` is off. The rounding error of a log probability is then
0.002 nats for logits with a standard deviation of 1.3, and 0.03 nats for a standard deviation of 8 (docs/mismatch.md).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asterism.policies.losses.logits_chunks import EAGER_LOGITS, FUSED_LOGITS, LogitsMemory

_MAX_BLOCK_LOGITS = 1024
_MIN_BLOCK_LOGITS = 64  # with fewer logits in a block, partial sums cost more than a second read
_CAST_BYTES = 8 << 20  # part of the output matrix that a CPU converts to float32 at once, small enough for its cache


class ChunkScores(NamedTuple):
    logprobs_C: Tensor
    entropies_C: Tensor
    log_sums_C: Tensor  # log of the sum of exp(logits / temperature)
    log_p_CV: Tensor | None = None  # log probabilities, if the kernels compute them anyway


class ScoredChunk(NamedTuple):
    """The inputs of the backward pass: inputs and results of the forward pass, and the gradients of the results."""

    logits_CV: Tensor
    targets_C: Tensor
    temperature: float
    log_sums_C: Tensor
    entropies_C: Tensor
    log_p_CV: Tensor | None  # log probabilities of a chunk that is not recomputed; the logits are then unused
    of_logprobs_C: Tensor  # gradients of the log probabilities
    of_entropies_C: Tensor | None  # gradients of the entropies


class HeadKernels(Protocol):
    """The pointwise functions between the products. Logits are float32 or wider."""

    @property
    def memory(self) -> LogitsMemory: ...

    def score(self, logits_CV: Tensor, targets_C: Tensor, temperature: float) -> ChunkScores:
        """Score the targets. The implementation may overwrite the logits."""
        ...

    def differentiate(self, chunk: ScoredChunk, out_CV: Tensor) -> None:
        """Write the gradient of the logits: (1[target] - p) / temperature for each log probability, and
        -p (log p + entropy) / temperature for each entropy. The implementation may overwrite the logits.
        """
        ...


class EagerHeadKernels:
    """Kernels as sequences of torch operations."""

    memory = EAGER_LOGITS

    def score(self, logits_CV: Tensor, targets_C: Tensor, temperature: float) -> ChunkScores:
        scaled_CV = logits_CV if temperature == 1.0 else logits_CV.div_(temperature)
        log_p_CV = torch.log_softmax(scaled_CV, dim=-1)
        logprobs_C = log_p_CV.gather(-1, targets_C[:, None]).squeeze(-1)
        log_sums_C = scaled_CV.gather(-1, targets_C[:, None]).squeeze(-1) - logprobs_C
        entropies_C = torch.linalg.vecdot(torch.exp(log_p_CV, out=scaled_CV), log_p_CV).neg_()
        return ChunkScores(logprobs_C, entropies_C, log_sums_C, log_p_CV)

    def differentiate(self, chunk: ScoredChunk, out_CV: Tensor) -> None:
        log_p_CV, temperature = chunk.log_p_CV, chunk.temperature
        if log_p_CV is None:
            scaled_CV = chunk.logits_CV if temperature == 1.0 else chunk.logits_CV.div_(temperature)
            log_p_CV = scaled_CV.sub_(chunk.log_sums_C[:, None])
        targets_C1, of_logprobs_C1 = chunk.targets_C[:, None], chunk.of_logprobs_C[:, None]
        gradient_CV = torch.exp(log_p_CV, out=out_CV) if out_CV.dtype == log_p_CV.dtype else log_p_CV.exp()
        if chunk.of_entropies_C is None:
            gradient_CV.mul_(-of_logprobs_C1)
        else:
            factors_CV = (log_p_CV + chunk.entropies_C[:, None]).mul_(chunk.of_entropies_C[:, None])
            gradient_CV.mul_(factors_CV.add_(of_logprobs_C1)).neg_()
        gradient_CV.scatter_add_(-1, targets_C1, of_logprobs_C1)
        if temperature != 1.0:
            gradient_CV.div_(temperature)
        if gradient_CV is not out_CV:
            out_CV.copy_(gradient_CV)


class FusedHeadKernels:
    """Kernels as one expression for each pass, for torch.compile: the forward pass reads the logits once, and the
    backward pass reads the logits and writes their gradient once.

    `compile_function` compiles an expression; without it, the expressions run eagerly.
    """

    memory = FUSED_LOGITS

    def __init__(
        self, compile_function: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    ):
        self._score = compile_function(score_logits)
        self._differentiate = compile_function(differentiate_logits)

    def score(self, logits_CV: Tensor, targets_C: Tensor, temperature: float) -> ChunkScores:
        return ChunkScores(*self._score(logits_CV, targets_C, temperature))

    def differentiate(self, chunk: ScoredChunk, out_CV: Tensor) -> None:
        self._differentiate(chunk, out_CV)


def score_logits(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log probabilities, entropies and logs of sums, each [C].

    The function sums a row in K blocks of B logits, and then the blocks. A compiled kernel keeps a block in registers
    between the maximum and the sums, so that it reads the logits once; it would read a whole row of a large vocabulary
    twice. The sums of the blocks are vectors: Inductor pads the rows of a matrix, and then keeps no block in registers.
    """
    num_rows, vocab_size = logits_CV.shape
    scaled_LB = logits_CV.view(-1, count_block_logits(vocab_size)) / temperature  # L = C * K
    largest_L = scaled_LB.amax(-1)
    powers = _sum_powers(scaled_LB - largest_L[:, None])
    largest_CK, sums_CK, products_CK = (each_L.view(num_rows, -1) for each_L in (largest_L, *powers))
    largest_C = largest_CK.amax(-1)
    differences_CK = largest_CK - largest_C[:, None]
    factors_CK = differences_CK.exp()
    sums_C = (factors_CK * sums_CK).sum(-1)
    products_C = (factors_CK * (products_CK + sums_CK * differences_CK)).sum(-1)
    log_sums_C = largest_C + sums_C.log()
    logprobs_C = logits_CV.gather(-1, targets_C[:, None]).squeeze(-1) / temperature - log_sums_C
    return logprobs_C, sums_C.log() - products_C / sums_C, log_sums_C


def count_block_logits(vocab_size: int) -> int:
    """Return the largest power of two that divides the vocabulary, up to the longest row that Inductor keeps in registers.

    Without such a divisor, a block is the whole row.
    """
    block = min(vocab_size & -vocab_size, _MAX_BLOCK_LOGITS)
    return block if block >= _MIN_BLOCK_LOGITS else vocab_size


def _sum_powers(x_LB: Tensor) -> tuple[Tensor, Tensor]:
    """Sum e^x and x e^x over B; each result is [L]."""
    powers_LB = x_LB.exp()
    return powers_LB.sum(-1), (powers_LB * x_LB).sum(-1)


def differentiate_logits(chunk: ScoredChunk, out_CV: Tensor) -> None:
    log_p_CV = chunk.logits_CV / chunk.temperature - chunk.log_sums_C[:, None]
    of_logprobs_C1 = factors_CV = chunk.of_logprobs_C[:, None]
    if chunk.of_entropies_C is not None:
        factors_CV = factors_CV + chunk.of_entropies_C[:, None] * (log_p_CV + chunk.entropies_C[:, None])
    is_target_CV = torch.arange(out_CV.shape[-1], device=out_CV.device) == chunk.targets_C[:, None]
    ones_CV = torch.where(is_target_CV, of_logprobs_C1, 0.0)
    out_CV.copy_((ones_CV - log_p_CV.exp() * factors_CV) / chunk.temperature)


# ---------------------------------------------------------------- products


def compute_logits(hidden_CE: Tensor, weight_VE: Tensor, *, float32_logits: bool) -> Tensor:
    """Return logits [C, V] in float32 or wider. Hidden states and weight have the same dtype."""
    if hidden_CE.dtype.itemsize > 2:
        return hidden_CE @ weight_VE.t()
    if not float32_logits:
        return (hidden_CE @ weight_VE.t()).float()
    if hidden_CE.is_cuda:
        return torch.mm(hidden_CE, weight_VE.t(), out_dtype=torch.float32)
    exact_CE, logits_CV = hidden_CE.float(), hidden_CE.new_empty(len(hidden_CE), len(weight_VE), dtype=torch.float32)
    num_rows = max(1, _CAST_BYTES // (4 * weight_VE.shape[1]))
    for rows_RE, out_CR in zip(weight_VE.split(num_rows), logits_CV.split(num_rows, dim=1), strict=True):
        torch.mm(exact_CE, rows_RE.float().t(), out=out_CR)
    return logits_CV


def add_weight_gradient(total_VE: Tensor | None, gradient_GV: Tensor, hidden_GE: Tensor) -> Tensor:
    """Add the gradient of G tokens to `total_VE` in place; without a total, return a new tensor. float32 or wider."""
    transposed_VG = gradient_GV.t()
    if gradient_GV.dtype.itemsize > 2:
        return transposed_VG @ hidden_GE if total_VE is None else total_VE.addmm_(transposed_VG, hidden_GE)
    if not gradient_GV.is_cuda:
        product_VE = transposed_VG @ hidden_GE
        return product_VE.float() if total_VE is None else total_VE.add_(product_VE)
    if total_VE is None:
        return torch.mm(transposed_VG, hidden_GE, out_dtype=torch.float32)
    return torch.addmm(total_VE, transposed_VG, hidden_GE, out_dtype=torch.float32, out=total_VE)
