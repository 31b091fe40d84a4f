"""Tests of the blocks of attention: each source of keys and values has a type."""

from typing import Any, NamedTuple

import pytest
import torch

from asterism.engine.inference.kernels.attention import DenseBlock, GatheredBlock, PagedAttention
from asterism.engine.inference.kernels.flash_varlen import FlashKernel
from asterism.engine.inference.kernels.packed_prompts import PackedPrompts
from asterism.engine.inference.kv.kv_cache import KvCache
from asterism.engine.inference.sequence import PrefillChunk, Sequence
from tests.engine.inference.varlen_stubs import varlen_2_11
from tests.engine.tiny_models import small_config

PAGE, LONGEST = 16, 64


def build_attention(flash: FlashKernel | None = None) -> PagedAttention:
    return PagedAttention(KvCache(small_config(), 8, PAGE, torch.float32, "cpu"), LONGEST, flash)


def build_prompts(attention: PagedAttention, *, tokens: int) -> list[Any]:
    sequence = Sequence(1)
    sequence.pages = [0, 1, 2, 3]
    chunks = [PrefillChunk(sequence, 0, tokens)]
    arrays = [torch.from_numpy(array) for array in attention.list_prefill_arrays(chunks)]
    return list(attention.build_prefill_blocks(2, chunks, arrays))


def test_running_sequences_are_dense_up_to_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = torch.zeros((2, LONGEST // PAGE), dtype=torch.int64)
    [dense] = build_attention().build_decode_blocks([1, 2], [20, 30], tables)
    assert isinstance(dense, DenseBlock) and (dense.first, dense.end, dense.width) == (0, 2, 32)
    monkeypatch.setattr("asterism.engine.inference.kv.contiguous_kv.DENSE_CACHE_BYTES", 0)
    [gathered] = build_attention().build_decode_blocks([1, 2], [20, 30], tables)
    assert isinstance(gathered, GatheredBlock) and not gathered.is_shared
    assert (gathered.first, gathered.end, gathered.width) == (0, 2, 32)


def test_only_a_flash_kernel_packs_prompts() -> None:
    [packed] = build_prompts(build_attention(FlashKernel(varlen_2_11)), tokens=40)
    assert isinstance(packed, PackedPrompts) and (packed.first, packed.end) == (2, 42)
    [shared] = build_prompts(build_attention(), tokens=40)
    assert isinstance(shared, GatheredBlock) and shared.is_shared
    rows = build_prompts(build_attention(), tokens=5)
    assert all(isinstance(block, GatheredBlock) and not block.is_shared for block in rows)


def test_a_block_of_another_type_is_refused() -> None:
    class Other(NamedTuple):
        first: int = 0
        end: int = 1
        width: int = PAGE

    unknown: Any = Other()
    with pytest.raises(AssertionError, match="unreachable"):
        build_attention().plan(torch.zeros(1, dtype=torch.int64), [unknown])
