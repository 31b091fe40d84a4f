"""Sizes of the chunks in which the output head computes logits. The plan of memory uses them too, so torch is not imported."""

from typing import NamedTuple

_CHUNK_BYTES = 768 << 20  # of the logits of a chunk with the temporary tensors of the kernels
_GROUP_BYTES = 1 << 30  # of the 16-bit gradients of the logits of a group
_MAX_GROUP_TOKENS = 4096


class LogitsMemory(NamedTuple):
    """Of one implementation of asterism.policies.losses.head_kernels.HeadKernels."""

    bytes_per_logit: int  # at the peak, without the gradient that is the result
    max_chunk_tokens: int

    def count_gpu_bytes(self, vocab_size: int, num_tokens: int) -> int:
        """At the peak of a backward pass in 16 bits: the logits of a chunk, and the gradients of a group of chunks."""
        chunk = count_chunk_tokens(vocab_size, self)
        group = count_group_tokens(vocab_size, chunk)
        return vocab_size * (min(num_tokens, chunk) * self.bytes_per_logit + 2 * min(num_tokens, group))


EAGER_LOGITS = LogitsMemory(12, 1 << 30)  # logits, log probabilities and probabilities in float32
FUSED_LOGITS = LogitsMemory(4, 512)  # logits; more tokens do not make the products faster


def count_chunk_tokens(vocab_size: int, memory: LogitsMemory = EAGER_LOGITS) -> int:
    tokens = max(1, _CHUNK_BYTES // (memory.bytes_per_logit * vocab_size))
    return min(tokens, memory.max_chunk_tokens)


def count_group_tokens(vocab_size: int, chunk_tokens: int) -> int:
    """Whole chunks, at least one: a group's gradients are multiplied together on a GPU."""
    tokens = min(_MAX_GROUP_TOKENS, _GROUP_BYTES // (2 * vocab_size))
    return max(1, tokens // chunk_tokens) * chunk_tokens
