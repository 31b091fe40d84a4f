"""Tests of the blocks that running sequences share, and of the pages that a joining sequence gathers."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from asterism.engine.inference.kv.contiguous_kv import DenseKvBlock, DenseKvCache
from asterism.engine.inference.kv.kv_cache import KvCache
from tests.engine.tiny_models import small_config

ROWS = 3
PAGE, LONGEST, MOST = 16, 256, 8


@pytest.fixture
def cache() -> KvCache:
    return KvCache(small_config(), MOST * LONGEST // PAGE, PAGE, torch.float32, "cpu")


@pytest.fixture
def blocks(cache: KvCache, monkeypatch: pytest.MonkeyPatch) -> DenseKvCache:
    monkeypatch.setattr("asterism.engine.inference.kv.contiguous_kv.DENSE_BLOCK_ROWS", ROWS)
    return DenseKvCache(cache, torch.empty(LONGEST * 2 * cache.num_kv_heads * cache.head_dim))


def run(blocks: DenseKvCache, lengths: dict[int, int]) -> list[list[int]]:
    """Run these sequences. Return their ids by block and row."""
    names = list(lengths)
    order = [names[number] for number in blocks.order_by_length(names, list(lengths.values()))]
    blocks.assign_blocks(order, [lengths[name] for name in order], torch.zeros((len(order), 16), dtype=torch.int64))
    return [order[first : first + ROWS] for first in range(0, len(order), ROWS)]


def test_blocks_contain_sequences_of_similar_length_in_ascending_order(blocks: DenseKvCache) -> None:
    lengths = {name: int(length) for name, length in enumerate(np.random.default_rng(0).permutation(200)[:11])}
    found = run(blocks, lengths)
    reached = [[lengths[name] for name in names] for names in found]
    assert sorted(length for block in reached for length in block) == sorted(lengths.values())
    assert all(max(block) < min(behind) for block, behind in pairwise(reached))


def test_a_join_or_leave_moves_at_most_one_sequence_into_a_block(blocks: DenseKvCache) -> None:
    lengths = {name: 10 * name + 10 for name in range(12)}
    before = run(blocks, lengths)
    del lengths[4]
    after = run(blocks, lengths)
    assert after[0] == before[0]
    moved = [sum(name not in old for name in new) for old, new in zip(before, after, strict=True)]
    assert moved == [0, 1, 1, 0]
    stayed = [(name, old.index(name)) for old, new in zip(before, after, strict=True) for name in new if name in old]
    places = {name: row for new in after for row, name in enumerate(new)}
    assert sum(places[name] == row for name, row in stayed) >= len(stayed) - 1  # one block has lost a row
    lengths[20] = 5
    again = run(blocks, lengths)
    assert [sum(name not in old for name in new) for old, new in zip(after, again, strict=True)] == [1, 1, 1, 1]


def test_sequences_above_the_memory_limit_are_not_kept(blocks: DenseKvCache, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = torch.zeros((7, 16), dtype=torch.int64)
    assert [block.num_rows for block in blocks.assign_blocks(range(7), [64] * 7, tables)] == [3, 3, 1]
    for num_bytes, num_rows in ((2 * ROWS * 96 * 2 * 2 * 2 * 16 * 4, [3, 3]), (0, [])):
        monkeypatch.setattr("asterism.engine.inference.kv.contiguous_kv.DENSE_CACHE_BYTES", num_bytes)
        assert [block.num_rows for block in blocks.assign_blocks(range(7), [64] * 7, tables)] == num_rows


def take_in(cache: KvCache, blocks: DenseKvCache, at: dict[int, int]) -> None:
    """Run a pass with one new token per sequence at these positions. Check that the blocks equal the cache."""
    names = list(at)
    names = [names[number] for number in blocks.order_by_length(names, list(at.values()))]
    tables = first_pages(names)[:, None] + torch.arange(LONGEST // PAGE)
    held = blocks.assign_blocks(names, [(at[name] // PAGE + 1) * PAGE for name in names], tables)
    assert sum(block.num_rows for block in held) == len(names)
    for layer in range(len(cache.memory)):
        first = 0
        for block in held:
            take_in_block(cache, block, layer, {name: at[name] for name in names[first : first + block.num_rows]})
            first += block.num_rows


def first_pages(names: list[int]) -> Tensor:
    return torch.tensor(names) % MOST * (LONGEST // PAGE)


def take_in_block(cache: KvCache, block: DenseKvBlock, layer: int, at: dict[int, int]) -> None:
    positions, starts = torch.tensor(list(at.values())), first_pages(list(at)) * PAGE
    new = torch.randn(len(at), 2 * cache.num_kv_heads, cache.head_dim)
    cache.write(layer, cache.compute_addresses(starts + positions), new)
    keys, values = block.update(layer, block.compute_addresses(positions), new)
    in_cache = cache.memory[layer].view(2, cache.num_kv_heads, -1, cache.head_dim)
    for row, (start, place) in enumerate(zip(starts.tolist(), at.values(), strict=True)):
        heads = slice(row * cache.num_kv_heads, (row + 1) * cache.num_kv_heads)
        expected = in_cache[:, :, start : start + place + 1]
        assert torch.equal(keys[heads, : place + 1], expected[0])
        assert torch.equal(values[heads, : place + 1], expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_blocks_equal_the_cache_while_sequences_grow_join_and_leave(
    cache: KvCache, blocks: DenseKvCache, seed: int
) -> None:
    cache.memory.normal_()
    draws = np.random.default_rng(seed)
    at: dict[int, int] = {}
    for name in range(150):
        if draws.random() < 0.2 and at:
            del at[int(draws.choice(list(at)))]
        if (draws.random() < 0.2 or not at) and all(name % MOST != other % MOST for other in at):
            at[name] = int(draws.integers(LONGEST - 1))
        at = {name: place + 1 for name, place in at.items() if place + 1 < LONGEST}
        if at:
            take_in(cache, blocks, at)
