import threading
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asterism.engine.learner.batches.minibatches import (
    MicroBatch,
    build_micro_batch,
    build_rl_minibatches,
    iter_prefetched,
)
from asterism.engine.learner.batches.training_sequence import (
    TrainingSequence,
    build_rl_sequence,
    build_sft_sequence,
    build_training_sequence,
)
from tests.engine.learner.training_examples import replace_tokens, rl_sequences, row


def test_a_micro_batch_selects_the_position_before_each_loss_token() -> None:
    first = build_training_sequence(
        np.array([5, 6, 7, 8], np.int32), np.array([True, False, True, True]), np.array([0, 0, -1, -2], np.float32), 0.5
    )
    second = build_training_sequence(
        np.array([1, 2], np.int32), np.array([False, True]), np.array([0, -3], np.float32), -0.5
    )
    batch = build_micro_batch([first, second], [0.5, 0.25])
    assert batch.token_ids_T.tolist() == [5, 6, 7, 1]
    assert batch.segments.lengths == (3, 1)
    assert batch.segments.offsets.tolist() == [0, 3, 4]
    assert batch.segments.positions_T.tolist() == [0, 1, 2, 0]
    assert batch.positions_N.tolist() == [1, 2, 3]
    assert batch.targets_N.tolist() == [7, 8, 2]
    assert batch.logprobs_N.tolist() == [-1.0, -2.0, -3.0]
    assert batch.advantages_N.tolist() == [0.5, 0.5, -0.5]
    assert (batch.sequences_N.tolist(), batch.num_sequences) == ([0, 0, 1], 2)
    assert batch.weights_N.tolist() == [0.5, 0.5, 0.25]


def test_a_micro_batch_has_a_shared_prompt_once() -> None:
    """The last token of the prompt predicts the first token of both responses; the second response has no other."""
    prompt = list(range(20, 30))
    rows = [(prompt, [1, 2, 3], [1, 0, 1]), ([7] * 10, [4, 5], [1, 1]), (prompt, [6], [1])]
    sequences = [
        build_training_sequence(
            np.array([*before, *after], np.int32),
            np.array([0] * 10 + mask, np.bool_),
            np.zeros(10 + len(after), np.float32),
            advantage,
        )
        for (before, after, mask), advantage in zip(rows, (0.5, 1.0, 2.0), strict=True)
    ]
    batch = build_micro_batch(sequences, [0.1, 0.2, 0.3], shares_prompts=True)
    assert batch.token_ids_T.tolist() == [*prompt, 1, 2, *[7] * 10, 4]
    assert batch.segments.families == ((10, 2), (11,))
    assert batch.segments.positions_T.tolist() == [*range(12), *range(11)]
    assert batch.positions_N.tolist() == [9, 11, 21, 22, 9]
    assert batch.targets_N.tolist() == [1, 3, 4, 5, 6]
    assert batch.sequences_N.tolist() == [0, 0, 1, 1, 2]
    assert batch.advantages_N.tolist() == [0.5, 0.5, 1.0, 1.0, 2.0]
    assert batch.weights_N.tolist() == [0.1, 0.1, 0.2, 0.2, 0.3]
    unshared = build_micro_batch(sequences, [0.1, 0.2, 0.3])
    assert unshared.segments.families == ()
    for name in ("targets_N", "sequences_N", "advantages_N", "weights_N", "logprobs_N", "groups_N"):
        assert torch.equal(getattr(batch, name), getattr(unshared, name))


def test_an_empty_micro_batch_has_one_token_without_loss() -> None:
    batch = build_micro_batch([], [])
    assert batch.token_ids_T.tolist() == [0]
    assert batch.num_sequences == 0
    tensors = [value for value in batch if isinstance(value, torch.Tensor)]
    assert [len(values) for values in tensors[1:]] == [0] * 7
    integers, floats = torch.int64, torch.float32
    types = [integers, integers, integers, floats, floats, integers, torch.float64, integers]
    assert [values.dtype for values in tensors] == types


def test_tokens_after_the_last_loss_token_are_dropped() -> None:
    assert build_sft_sequence([1, 2, 3, 4], [0, 1, 0, 0]).token_ids.tolist() == [1, 2]


def test_the_first_token_is_never_in_the_loss() -> None:
    assert build_sft_sequence([1, 2], [1, 1]).loss_mask.tolist() == [False, True]


def test_the_error_for_arrays_of_different_lengths_names_the_trajectory() -> None:
    broken = replace_tokens(row(41, 0, seed=0), logprobs=b"")
    with pytest.raises(ValueError, match=r"trajectory 41: .* logprobs"):
        build_rl_sequence(broken)


def test_each_group_is_in_one_minibatch_and_no_row_is_dropped() -> None:
    batch = rl_sequences(0, groups=5, size=3)
    minibatches = build_rl_minibatches(batch, 2, seed=1, step=4)
    names = [[sequence.token_ids.tobytes() for sequence in minibatch] for minibatch in minibatches]
    group_of = {each.token_ids.tobytes(): each.group_id for each in batch}
    groups = [{group_of[name] for name in minibatch} for minibatch in names]
    assert [len(minibatch) for minibatch in minibatches] == [6, 9]
    assert groups[0].isdisjoint(groups[1])
    assert groups[0] | groups[1] == set(range(5))


@given(st.permutations(range(20)))
def test_minibatches_do_not_depend_on_the_arrival_order_of_rows(order: list[int]) -> None:
    rows = rl_sequences(0)
    arrived = [rows[index] for index in order]
    assert _advantages(build_rl_minibatches(arrived, 2, 0, 0)) == _advantages(build_rl_minibatches(rows, 2, 0, 0))


def _advantages(minibatches: list[list[TrainingSequence]]) -> list[list[float]]:
    return [[sequence.advantage for sequence in minibatch] for minibatch in minibatches]


def test_the_number_of_minibatches_is_at_most_the_number_of_groups() -> None:
    assert len(build_rl_minibatches(rl_sequences(0, groups=1), 4, 0, 0)) == 1
    assert build_rl_minibatches([], 4, 0, 0) == []


def test_one_micro_batch_is_prepared_ahead_and_in_order() -> None:
    batch = build_micro_batch([], [])
    begun = [threading.Event() for _ in range(3)]

    def load(number: int) -> MicroBatch:
        begun[number].set()
        return batch._replace(num_sequences=number)

    found = iter_prefetched([partial(load, number) for number in range(3)])
    assert next(found).num_sequences == 0
    assert begun[1].wait(timeout=30)
    assert not begun[2].is_set()
    assert [each.num_sequences for each in found] == [1, 2]
    assert list(iter_prefetched([])) == []


def test_an_error_of_a_prefetched_micro_batch_is_raised_in_order() -> None:
    def fail() -> MicroBatch:
        raise OSError("unreadable")

    found = iter_prefetched([partial(build_micro_batch, [], []), fail])
    assert next(found).num_sequences == 0
    with pytest.raises(OSError, match="unreadable"):
        next(found)
