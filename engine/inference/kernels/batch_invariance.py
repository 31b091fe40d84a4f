"""Tests whether this machine computes a token with the same bits in every batch.

No library guarantees this. So an engine with `determinism = "strict"` tests its matrix products for the numbers of rows
of a pass, and attention at several widths, before it starts. Products that fail are computed in tiles.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from asterism.configs.errors import UnusableInput
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.inference.buffer_sizes import MIN_ROWS
from asterism.engine.inference.kernels.attention_kernels import AttentionKernels
from asterism.engine.inference.kernels.matmul import PLAIN, Matmul, build_tiled, select_fast_matmul
from asterism.engine.inference.kv.kv_cache import WIDTH_STEP

TILE_ROWS = (64, 16, MIN_ROWS)  # the engine uses the first batch-invariant size
EXHAUSTIVE_MAX_ROWS = 40  # all numbers of rows up to this one are tested; above, only those around powers of two
MAX_TESTED_TOKENS = 4096  # widest tested attention
_TESTED_ROWS = 5  # rows of a batch in the test of attention


class NotBatchInvariant(UnusableInput):
    """A machine on which a token's bits depend on other tokens in its batch."""


def find_batch_invariant_matmul(
    config: DecoderConfig, max_rows: int, max_logit_rows: int, candidates: Sequence[Matmul] = ()
) -> Matmul:
    """Return the first candidate that computes a row with the same bits in all passes of up to `max_rows` rows.

    At most `max_logit_rows` rows have logits. Default candidates are the fastest products of a CPU, plain products,
    then tiles. Raises NotBatchInvariant.
    """
    shapes = [*_list_matrix_shapes(config), (config.hidden_size, config.vocab_size)]
    limits = [max_rows] * (len(shapes) - 1) + [max_logit_rows]
    for matmul in candidates or (
        select_fast_matmul(torch.device("cpu"), torch.float32),
        PLAIN,
        *map(build_tiled, TILE_ROWS),
    ):
        if all(_is_batch_invariant(matmul, *shape, limit) for shape, limit in zip(shapes, limits, strict=True)):
            return matmul
    raise NotBatchInvariant(_format_error("matrix products"))


def check_attention(kernels: AttentionKernels, config: DecoderConfig, max_sequence_tokens: int) -> None:
    """Raise NotBatchInvariant if the bits of attention depend on the batch."""
    if not is_attention_batch_invariant(kernels, config, max_sequence_tokens):
        raise NotBatchInvariant(_format_error("attention"))


def _format_error(operation: str) -> str:
    version = torch.__version__
    return (
        f'determinism is "strict", but on this machine the bits of {operation} of torch {version} depend on the batch; '
        'set determinism to "fast", or use another machine'
    )


# ---------------------------------------------------------------- products


def _list_matrix_shapes(config: DecoderConfig) -> list[tuple[int, int]]:
    """Return the shapes [in, out] of the decoder's fused matrices."""
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [(width, queries + 2 * keys), (queries, width), (width, 2 * inner), (inner, width)]


def _is_batch_invariant(matmul: Matmul, size_in: int, size_out: int, max_rows: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    weights_KF = matmul.prepare(torch.randn(size_in, size_out, generator=generator))
    max_rows = max(max_rows, MIN_ROWS)
    x_NK = torch.randn(max_rows + 1, size_in, generator=generator)
    to_NF = torch.randn(max_rows + 1, size_out, generator=generator)
    return _is_product_invariant(lambda rows: matmul.mm(x_NK[rows], weights_KF), max_rows) and _is_product_invariant(
        lambda rows: matmul.add_mm(to_NF[rows], x_NK[rows], weights_KF), max_rows
    )


def _is_product_invariant(product: Callable[[slice], Tensor], max_rows: int) -> bool:
    """Return whether rows have the same bits in products of 4 and of more rows, and after a shift by one row."""
    starts = range(0, max_rows - MIN_ROWS + 1, MIN_ROWS)
    expected_NF = product(slice(max_rows + 1))
    fours = (slice(start, start + MIN_ROWS) for start in starts)
    if not all(torch.equal(product(rows), expected_NF[rows]) for rows in fours):
        return False
    for count in _list_row_counts(max_rows):
        for first in range(2 if count <= EXHAUSTIVE_MAX_ROWS else 1):
            rows = slice(first, first + count)
            if not torch.equal(product(rows), expected_NF[rows]):
                return False
    return True


def _list_row_counts(max_rows: int) -> list[int]:
    powers = [1 << bits for bits in range(max_rows.bit_length())]
    around = [power + more for power in powers for more in (-1, 0, 1)]
    return sorted(
        {count for count in (*range(EXHAUSTIVE_MAX_ROWS), *around, max_rows) if MIN_ROWS <= count <= max_rows}
    )


# ---------------------------------------------------------------- attention


def is_attention_batch_invariant(kernels: AttentionKernels, config: DecoderConfig, max_sequence_tokens: int) -> bool:
    """Return whether one token's attention has the same bits in batches of one and of several rows, with separate and
    with shared keys, and with any padding of the width."""
    widest = -(-min(max_sequence_tokens, MAX_TESTED_TOKENS) // WIDTH_STEP) * WIDTH_STEP
    generator = torch.Generator().manual_seed(0)
    heads, size = config.num_kv_heads, config.head_dim
    q_KGD = torch.randn(heads, config.num_heads // heads, size, generator=generator) * size**-0.5
    keys_KWD, values_KWD = torch.randn(2, heads, widest, size, generator=generator)
    for tokens in sorted({1, WIDTH_STEP, WIDTH_STEP + 1, widest // 2, widest - 1}):
        width = -(-tokens // WIDTH_STEP) * WIDTH_STEP
        seen = [(q_KGD, keys_KWD[:, :each], values_KWD[:, :each], tokens) for each in (width, widest)]
        expected_KGD = _attend_rows(kernels.attend_per_row, *seen[0], rows=1)[0]
        for case in seen:
            for kernel in (kernels.attend_per_row, kernels.attend_shared):
                if not all(
                    torch.equal(row_KGD, expected_KGD) for row_KGD in _attend_rows(kernel, *case, rows=_TESTED_ROWS)
                ):
                    return False
    return True


def _attend_rows(
    kernel: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None],
    q_KGD: Tensor,
    keys_KWD: Tensor,
    values_KWD: Tensor,
    tokens: int,
    *,
    rows: int,
) -> list[Tensor]:
    """Return the outputs of a batch of `rows` equal rows."""
    num_copies = rows if kernel.__name__ == "attend_per_row" else 1
    q_XGD = q_KGD.repeat(rows, 1, 1)
    mask_R1W = torch.where(torch.arange(keys_KWD.shape[1]) < tokens, 0.0, float("-inf")).expand(rows, 1, -1)
    out_XGD = torch.empty_like(q_XGD)
    kernel(q_XGD, keys_KWD.repeat(num_copies, 1, 1), values_KWD.repeat(num_copies, 1, 1), mask_R1W, out_XGD)
    return list(out_XGD.unflatten(0, (rows, -1)))
