"""Sizes of the output head's chunks of logits. The memory plan also uses them, so this file must not import torch."""

from typing import NamedTuple

_CHUNK_BYTES = 768 << 20  # maximum size of a chunk's logits with the temporary tensors of the kernels
_GROUP_BYTES = 1 << 30  # maximum size of the 16-bit gradients of the logits of a group of chunks
_MAX_GROUP_TOKENS = 4096


class LogitsMemory(NamedTuple):
    """The memory of one implementation of asterism.policies.losses.head_kernels.HeadKernels."""

    bytes_per_logit: int  # bytes at the peak, without the gradient that is the result
    max_chunk_tokens: int

    def count_gpu_bytes(self, vocab_size: int, num_tokens: int) -> int:
        """Return the peak of a backward pass in 16 bits: a chunk's logits, and the gradients of a group of chunks."""
        chunk = count_chunk_tokens(vocab_size, self)
        group = count_group_tokens(vocab_size, chunk)
        return vocab_size * (min(num_tokens, chunk) * self.bytes_per_logit + 2 * min(num_tokens, group))


EAGER_LOGITS = LogitsMemory(12, 1 << 30)  # bytes of logits, log probabilities and probabilities in float32
FUSED_LOGITS = LogitsMemory(4, 512)  # bytes of float32 logits; more than 512 tokens do not make the products faster


def count_chunk_tokens(vocab_size: int, memory: LogitsMemory = EAGER_LOGITS) -> int:
    tokens = max(1, _CHUNK_BYTES // (memory.bytes_per_logit * vocab_size))
    return min(tokens, memory.max_chunk_tokens)


def count_group_tokens(vocab_size: int, chunk_tokens: int) -> int:
    """Return the number of tokens in a group of whole chunks. On a GPU, one product computes a group's gradients."""
    tokens = min(_MAX_GROUP_TOKENS, _GROUP_BYTES // (2 * vocab_size))
    return max(1, tokens // chunk_tokens) * chunk_tokens
