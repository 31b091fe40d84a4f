"""Rows of a pass, and the working memory of the engine beyond weights and KV cache. Without torch, for `asterism plan`.

Not counted: activations of a pass, which are small, workspaces of kernels (that of torch.sort among them), and fragments
of the allocator.
"""

from typing import NamedTuple

# A pass of fewer rows is padded: with fewer, a matrix product sums in another order, and last bits would differ.
MIN_ROWS = 4
MAX_GATHER_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}  # of keys and values of one layer, in one block
# Kept copies of keys and values of all layers have this limit; rows beyond it are gathered at every step.
DENSE_CACHE_BYTES = 256 << 20
# FlashAttention 2 reads pages of a multiple of this many tokens.
PAGE_TOKENS_STEP = 256
_LOGIT_BYTES = 4  # float32


def pad_to_bucket(count: int, min_step: int) -> int:
    """Return the next graph size: multiples of `min_step`; from 8 * `min_step` on, four sizes per doubling."""
    step = max(min_step, (1 << (count - 1).bit_length()) // 8)
    return -(-count // step) * step


class BufferShape(NamedTuple):
    """The settings of one engine that decide on the sizes of its buffers."""

    rows: int  # of running sequences
    vocab_size: int
    sequence_tokens: int  # of the longest sequence
    token_bytes: int  # of keys and values of one layer
    device: str  # its type
    has_graphs: bool
    has_filter: bool  # some requests have top-p or top-k
    reads_pages: bool  # attention does not gather


def count_gather_tokens(device: str, token_bytes: int, widest_tokens: int) -> int:
    """Count the tokens of attention's buffer: at least the longest sequence, with padding."""
    return max(MAX_GATHER_BYTES.get(device, MAX_GATHER_BYTES["cuda"]) // token_bytes, widest_tokens)


def count_sampling_bytes(rows: int, vocab_size: int, *, has_filter: bool) -> int:
    """Count the bytes at the peak of asterism.engine.inference.sampling.sample, with its logits.

    In float32 per row and token: logits, which the weights and then their sums overwrite, and logprobs. With a filter,
    also sorted weights, their order in int64, sums of sorted weights, and a mask.
    """
    filter_bytes = 2 * _LOGIT_BYTES + 8 + 1 if has_filter else 0
    return rows * vocab_size * (2 * _LOGIT_BYTES + filter_bytes)


def count_buffer_bytes(shape: BufferShape) -> int:
    """Count the working memory of one engine."""
    rows = pad_to_bucket(shape.rows, MIN_ROWS)
    total = count_sampling_bytes(rows, shape.vocab_size, has_filter=shape.has_filter)
    if shape.has_graphs:  # they keep the memory of their own sampling; steps with prompts sample outside of them
        total += count_sampling_bytes(rows, shape.vocab_size, has_filter=False)
    if not shape.reads_pages:
        total += shape.token_bytes * count_gather_tokens(shape.device, shape.token_bytes, shape.sequence_tokens)
        total += 0 if shape.has_graphs else DENSE_CACHE_BYTES
    return total
