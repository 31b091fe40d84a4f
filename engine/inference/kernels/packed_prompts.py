"""Attention of all prompt tokens of a pass in one call per layer, over keys without padding.

If all prompts are prefilled from their first token, their keys and values come from the pass. If a prompt has cached
tokens, the keys and values of all prompts are gathered from the cache into attention's buffer. If they exceed the
buffer, there is one call for each group of prompts that fits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asterism.engine.inference.kernels.flash_varlen import FlashKernel, Queries
from asterism.engine.inference.kv.kv_cache import KvCache
from asterism.engine.inference.sequence import PrefillChunk

NUM_ARRAYS = 3  # number of arrays for each group of prompts


class PackedPrompts(NamedTuple):
    """The rows [first, end): the tokens of C chunks of prompts."""

    first: int
    end: int
    queries: Queries
    keys: Queries
    slots: Tensor | None  # int64 [S], cache slots of keys and values; None: all are new


def group_prompts(chunks: Sequence[PrefillChunk], max_tokens: int) -> list[Sequence[PrefillChunk]]:
    """Group adjacent chunks. The ends of a group's chunks add up to at most `max_tokens`, or the group has one chunk.

    Without cached tokens nothing is gathered, and all chunks are one group.
    """
    if not any(chunk.start for chunk in chunks):
        return [chunks] if chunks else []
    groups: list[list[PrefillChunk]] = []
    tokens = 0
    for chunk in chunks:
        tokens += chunk.end
        if groups and tokens <= max_tokens:
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
            tokens = chunk.end
    return [*groups]


def list_prompt_arrays(chunks: Sequence[PrefillChunk], page_tokens: int) -> list[NDArray[np.int64] | NDArray[np.int32]]:
    """Return the NUM_ARRAYS arrays of `build_packed_prompts`: offsets of queries, offsets of keys, slots of keys."""
    offsets = [_accumulate([chunk.end - chunk.start for chunk in chunks]), _accumulate([chunk.end for chunk in chunks])]
    if not any(chunk.start for chunk in chunks):
        return [*offsets, np.zeros(0, np.int64)]
    return [*offsets, np.concatenate([chunk._replace(start=0).compute_slots(page_tokens) for chunk in chunks])]


def build_packed_prompts(first: int, chunks: Sequence[PrefillChunk], arrays: Sequence[Tensor]) -> PackedPrompts:
    """Build a group of prompts. `arrays`: the arrays of `list_prompt_arrays`, on the device."""
    lengths = [chunk.end - chunk.start for chunk in chunks]
    queries, keys = Queries(arrays[0], max(lengths)), Queries(arrays[1], max(chunk.end for chunk in chunks))
    return PackedPrompts(first, first + sum(lengths), queries, keys, arrays[2] if len(arrays[2]) else None)


def attend_prompts(
    flash: FlashKernel,
    cache: KvCache,
    layer: int,
    q_NHD: Tensor,
    new_NJD: Tensor,
    prompts: PackedPrompts,
    buffer: Tensor,
) -> Tensor:
    """Compute attention of the prompts' rows, [N, H, D].

    `new_NJD`: keys and values of these rows in this pass; J = 2 * K. `buffer`: memory for gathered keys and values.
    """
    if prompts.slots is None:
        keys_SKD, values_SKD = new_NJD.split(cache.num_kv_heads, 1)
    else:
        keys_KSD, values_KSD = cache.gather_tokens(layer, prompts.slots, buffer)
        keys_SKD, values_SKD = keys_KSD.transpose(0, 1), values_KSD.transpose(0, 1)
    return flash.attend_packed(q_NHD, keys_SKD, values_SKD, prompts.queries, prompts.keys)


def _accumulate(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Return the offsets, [C + 1], from 0 to the sum of the lengths."""
    return np.cumsum([0, *lengths]).astype(np.int32)
