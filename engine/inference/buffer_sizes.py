"""Computes the rows of a pass and an engine's memory beyond weights and KV cache, for `asterism plan` without torch.

The sums leave out the small activations of a pass, workspaces of kernels such as torch.sort, and fragments of the
allocator.
"""

from typing import NamedTuple

# A pass is padded to this many rows: with fewer, a matrix product sums in another order, and last bits would differ.
MIN_ROWS = 4
MAX_GATHER_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}  # limit of the keys and values of one layer in one block
# limit of the copies of keys and values that are kept between steps; rows beyond this limit are gathered at every step
DENSE_CACHE_BYTES = 1 << 30
# FlashAttention 2 needs pages of a multiple of this many tokens.
PAGE_TOKENS_STEP = 256
# Elements of the smallest matrix that engine/inference/kernels/matmul.py packs for a CPU. Smaller matrices fit the L2
# cache, where packing gains less than a call of oneDNN costs.
MIN_PACKED_SIZE = 1 << 17
_LOGIT_BYTES = 4  # bytes of a float32


def pad_to_bucket(count: int, min_step: int) -> int:
    """Return the next graph size. Sizes are multiples of `min_step`; from 8 * `min_step` on, four per doubling."""
    step = max(min_step, (1 << (count - 1).bit_length()) // 8)
    return -(-count // step) * step


class BufferShape(NamedTuple):
    """The settings of one engine that determine the sizes of its buffers."""

    rows: int  # number of running sequences
    vocab_size: int
    sequence_tokens: int  # tokens of the longest sequence
    token_bytes: int  # bytes of a token's keys and values in one layer
    num_layers: int
    device: str  # type of the device, such as "cuda"
    has_graphs: bool
    has_filter: bool  # whether some requests have top-p or top-k
    reads_pages: bool  # whether attention reads pages in place, without gathering


def count_gather_tokens(device: str, token_bytes: int, widest_tokens: int) -> int:
    """Count the tokens of attention's buffer: at least the longest sequence, with padding."""
    return max(MAX_GATHER_BYTES.get(device, MAX_GATHER_BYTES["cuda"]) // token_bytes, widest_tokens)


def count_sampling_bytes(rows: int, vocab_size: int, *, has_filter: bool) -> int:
    """Count the peak bytes of asterism.engine.inference.sampling.sample, including its logits.

    Two float32 arrays [rows, tokens] contain the logits, which weights and then sums overwrite, and the logprobs. A
    filter adds sorted weights, their order in int64, sums of sorted weights, and a mask.
    """
    filter_bytes = 2 * _LOGIT_BYTES + 8 + 1 if has_filter else 0
    return rows * vocab_size * (2 * _LOGIT_BYTES + filter_bytes)


def count_buffer_bytes(shape: BufferShape) -> int:
    """Count the bytes of one engine's working memory."""
    rows = pad_to_bucket(shape.rows, MIN_ROWS)
    total = count_sampling_bytes(rows, shape.vocab_size, has_filter=shape.has_filter)
    if shape.has_graphs:  # graphs keep memory for sampling; steps with prompts sample outside of graphs
        total += count_sampling_bytes(rows, shape.vocab_size, has_filter=False)
    if not shape.reads_pages:
        total += shape.token_bytes * count_gather_tokens(shape.device, shape.token_bytes, shape.sequence_tokens)
        total += 0 if shape.has_graphs else _bound_dense_bytes(shape)
    return total


def _bound_dense_bytes(shape: BufferShape) -> int:
    """Bound the bytes of kept copies: a block has a power of two of rows, with room for an eighth more tokens."""
    rows = 1 << (shape.rows - 1).bit_length()
    tokens = shape.sequence_tokens * 9 // 8 + 32
    return min(DENSE_CACHE_BYTES, rows * tokens * shape.token_bytes * shape.num_layers)
