"""Tests: micro batches are full, and they are equally expensive on all ranks."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.engine.learner.batches.packing import split_micro_batches
from asterism.engine.learner.batches.siblings import find_siblings
from asterism.engine.learner.batches.training_sequence import TrainingSequence, build_training_sequence

LENGTHS = st.lists(st.integers(1, 50), max_size=40)
ATTENTION_TOKENS = 60_000.0


def sequence(length: int, counted: bool = True) -> TrainingSequence:
    ids = np.zeros(length, np.int32)
    return build_training_sequence(ids, np.full(length, counted), np.zeros(length, np.float32), 1.0)


def sibling(prompt: int, response: int, first: int = 0) -> TrainingSequence:
    """Make a sequence whose response is in the loss. Sequences with equal `prompt` and `first` have the same prompt."""
    ids = np.array([first, *range(1, prompt), *np.zeros(response)], np.int32)
    return build_training_sequence(ids, np.arange(len(ids)) >= prompt, np.zeros(len(ids), np.float32), 1.0)


def count_tokens(sequences: Sequence[TrainingSequence], indices: Sequence[int]) -> int:
    return sum(each.num_tokens for each in find_siblings(sequences, indices, shares_prompts=True))


def draw_lengths(count: int, seed: int) -> list[int]:
    """Draw lengths of long responses, at most 14,336 tokens."""
    draws = np.random.default_rng(seed).standard_normal(count)
    return np.minimum(7000 * np.exp(0.5 * draws), 14_336).astype(int).tolist()


def compute_costs(lengths: Sequence[int], shares: list[list[list[int]]]) -> np.ndarray:
    """Compute the costs of micro batches, [ranks, micro batches]."""
    tokens = [length - 1 for length in lengths]
    costs = [token * (1 + token / ATTENTION_TOKENS) for token in tokens]
    return np.array([[sum(costs[index] for index in indices) for indices in share] for share in shares])


@given(LENGTHS, st.integers(1, 4), st.integers(1, 200))
def test_all_ranks_together_train_once_on_each_sequence_with_loss(lengths: list[int], ranks: int, tokens: int) -> None:
    """The ranks have equal numbers of micro batches with at most `tokens` tokens or a single sequence."""
    shares = split_micro_batches([sequence(length) for length in lengths], ranks, tokens)
    dealt = [index for share in shares for indices in share for index in indices]
    assert sorted(dealt) == [index for index, length in enumerate(lengths) if length > 1]
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    assert shares[0]
    for indices in (indices for share in shares for indices in share):
        assert sum(lengths[index] - 1 for index in indices) <= tokens or len(indices) == 1


def test_a_sequence_without_loss_tokens_is_skipped() -> None:
    assert split_micro_batches([sequence(5, counted=False), sequence(4)], 1, 100) == [[[1]]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_of_long_sequences_are_full_and_cost_the_same_on_all_ranks(seed: int) -> None:
    lengths = draw_lengths(2000, seed)
    shares = split_micro_batches([sequence(length) for length in lengths], 32, 16_384, ATTENTION_TOKENS)
    room = 32 * len(shares[0]) * 16_384
    assert (sum(lengths) - len(lengths)) / room > 0.94
    costs = compute_costs(lengths, shares)
    assert costs.mean(0).sum() / costs.max(0).sum() > 0.94


def test_the_cost_of_a_sequence_includes_attention() -> None:
    """With attention, one sequence of 100 tokens costs as much as three of 50. So each rank has one micro batch."""
    sequences = [sequence(length + 1) for length in (100, 50, 50, 50)]
    assert split_micro_batches(sequences, 2, 150, attention_tokens=50.0) == [[[0]], [[1, 2, 3]]]
    assert split_micro_batches(sequences, 2, 150) == [[[0, 3]], [[1, 2]]]


def test_the_most_expensive_micro_batch_comes_first() -> None:
    lengths = draw_lengths(100, seed=0)
    for share in split_micro_batches([sequence(length) for length in lengths], 2, 16_384, ATTENTION_TOKENS):
        costs = compute_costs(lengths, [share])[0]
        assert list(costs) == sorted(costs, reverse=True)


# ---------------------------------------------------------------- shared prompts

SIBLINGS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), max_size=30)


@given(SIBLINGS, st.integers(1, 4), st.integers(1, 200))
def test_siblings_are_distributed_once_and_count_their_prompt_once(
    drawn: list[tuple[int, int]], ranks: int, tokens: int
) -> None:
    sequences = [sibling(8 + 10 * group, length, group) for group, length in drawn]
    shares = split_micro_batches(sequences, ranks, tokens, shares_prompts=True)
    assert sorted(index for share in shares for indices in share for index in indices) == list(range(len(sequences)))
    assert len({len(share) for share in shares}) == 1
    for indices in (indices for share in shares for indices in share):
        assert count_tokens(sequences, indices) <= tokens or len(indices) == 1


def test_a_micro_batch_holds_more_siblings_than_whole_sequences() -> None:
    """A group that exceeds a micro batch is divided into parts, each with its prompt."""
    sequences = [sibling(100, 101, group) for group in range(2) for _ in range(8)]
    (share,) = split_micro_batches(sequences, 1, 500, shares_prompts=True)
    assert [count_tokens(sequences, indices) for indices in share] == [500, 500, 500, 500]
    assert all(len({index // 8 for index in indices}) == 1 for indices in share)
    assert len(split_micro_batches(sequences, 1, 500)[0]) == 8


def test_siblings_are_divided_if_ranks_would_wait() -> None:
    """One group on two ranks: a rank with all eight siblings costs 900, and half of them on each rank cost 500."""
    sequences = [sibling(100, 101) for _ in range(8)]
    shares = split_micro_batches(sequences, 2, 1000, shares_prompts=True)
    assert [[len(indices) for indices in share] for share in shares] == [[4], [4]]


def test_different_and_short_prompts_are_not_shared() -> None:
    sequences = [sibling(20, 5), sibling(20, 5, first=1), sibling(21, 5), sibling(20, 9), *[sibling(3, 5)] * 2]
    groups = find_siblings(sequences, range(6), shares_prompts=True)
    assert [(each.indices, each.prompt_tokens) for each in groups] == [
        ([0, 3], 20), ([1], 0), ([2], 0), ([4], 0), ([5], 0)
    ]  # fmt: skip
    assert len(find_siblings(sequences, range(6), shares_prompts=False)) == 6
