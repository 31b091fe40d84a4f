"""Which running sequences are looked at together, and what has to be gathered when they come and go."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.kept import KeptBlocks
from engine.kv_cache import KvCache
from tests.engine.tiny_models import small_config

ROWS = 3


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> KeptBlocks:
    monkeypatch.setattr("engine.kept.KEPT_ROWS", ROWS)
    return KeptBlocks(KvCache(small_config(), 64, 16, torch.float32, "cpu"), most_pages=64)


def run(blocks: KeptBlocks, lengths: dict[int, int]) -> list[list[int]]:
    """The names by block and row, after these sequences have run."""
    names = list(lengths)
    order = [names[number] for number in blocks.arranged(names, list(lengths.values()))]
    blocks.hold(order, [lengths[name] for name in order], torch.zeros((len(order), 16), dtype=torch.int64))
    return [order[first : first + ROWS] for first in range(0, len(order), ROWS)]


def test_those_of_like_length_are_looked_at_together_the_shortest_first(blocks: KeptBlocks) -> None:
    lengths = {name: int(length) for name, length in enumerate(np.random.default_rng(0).permutation(200)[:11])}
    found = run(blocks, lengths)
    reached = [[lengths[name] for name in names] for names in found]
    assert sorted(length for block in reached for length in block) == sorted(lengths.values())
    assert all(max(block) < min(behind) for block, behind in pairwise(reached))


def test_one_that_comes_or_goes_moves_one_across_each_border_behind_it(blocks: KeptBlocks) -> None:
    lengths = {name: 10 * name + 10 for name in range(12)}
    before = run(blocks, lengths)
    del lengths[4]
    after = run(blocks, lengths)
    assert after[0] == before[0]
    moved = [sum(name not in old for name in new) for old, new in zip(before, after, strict=True)]
    assert moved == [0, 1, 1, 0]
    stayed = [(name, old.index(name)) for old, new in zip(before, after, strict=True) for name in new if name in old]
    places = {name: row for new in after for row, name in enumerate(new)}
    assert sum(places[name] == row for name, row in stayed) >= len(stayed) - 1  # of a block that has one row fewer
    lengths[20] = 5
    again = run(blocks, lengths)
    assert [sum(name not in old for name in new) for old, new in zip(after, again, strict=True)] == [1, 1, 1, 1]


def test_what_does_not_fit_into_the_limit_is_not_kept(blocks: KeptBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = torch.zeros((7, 16), dtype=torch.int64)
    assert [block.num_rows for block in blocks.hold(range(7), [64] * 7, tables)] == [3, 3, 1]
    monkeypatch.setattr("engine.kept.KEPT_BYTES", 2 * ROWS * 96 * 2 * 2 * 2 * 16 * 4)
    assert [block.num_rows for block in blocks.hold(range(7), [64] * 7, tables)] == [3, 3]
    monkeypatch.setattr("engine.kept.KEPT_BYTES", 0)
    assert blocks.hold(range(7), [64] * 7, tables) == []
