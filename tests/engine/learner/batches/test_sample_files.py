"""Tests of files of accepted groups: each rank of the learner reads its own samples, on any node."""

from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asterism.bus.messages import BatchGroup, BatchReady, GroupAccepted, ProtocolError
from asterism.engine.learner.batches import sample_exchange
from asterism.engine.learner.batches.batch_journal import BatchJournal
from asterism.engine.learner.batches.minibatches import build_rl_minibatches
from asterism.engine.learner.batches.packing import split_micro_batches
from asterism.engine.learner.batches.training_sequence import TrainingSequence, build_rl_sequence
from asterism.engine.learner.distributed import RankGroup, broadcast_object
from asterism.policies.groups.selection import MAX_PART_BYTES, split_accepted_group
from tests.engine.learner.rank_processes import run_ranks
from tests.engine.learner.training_examples import replace_tokens, row, rows, store_batch


def describe(sequence: TrainingSequence) -> tuple[object, ...]:
    arrays = (sequence.token_ids, sequence.loss_mask, sequence.logprobs)
    return (*(array.tolist() for array in arrays), *sequence[3:])


def test_stored_sequences_equal_the_samples(tmp_path: Path) -> None:
    samples = [*rows(1), replace_tokens(row(20, 5, 1), loss_mask=bytes(row(20, 5, 1).record.num_tokens))]
    stored = store_batch(tmp_path, 1, samples)
    assert len(stored) == 21
    for sequence, sample in zip(stored, samples, strict=True):
        expected = build_rl_sequence(sample)
        found = (sequence.trajectory_id, sequence.group_id, sequence.num_tokens, sequence.num_loss_tokens)
        assert found == (sample.trajectory_id, sample.group_id, len(expected.token_ids), expected.num_loss_tokens)
        assert sequence.token_id_range == expected.token_id_range
        assert sequence.prompt == expected.prompt
        assert describe(sequence.load()) == describe(expected)


def test_each_of_two_ranks_reads_at_most_55_percent_of_the_tokens(tmp_path: Path) -> None:
    stored = store_batch(tmp_path, 1, rows(1, groups=12, size=4))
    shares = split_micro_batches(stored, 2, 128)
    num_bytes = sum(sequence.num_bytes for sequence in stored)
    read = [sum(len(stored[index].read_bytes()) for indices in share for index in indices) for share in shares]
    assert sum(read) == num_bytes
    assert max(read) <= 0.55 * num_bytes


def test_the_error_for_a_truncated_file_names_the_trajectory(tmp_path: Path) -> None:
    *_, last = store_batch(tmp_path, 1, rows(1, groups=1))
    last.path.write_bytes(last.path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"group_00000000_0\.samples: the tokens of trajectory 3 are incomplete"):
        last.load()


def test_a_duplicate_part_replaces_the_file(tmp_path: Path) -> None:
    store_batch(tmp_path, 1, [replace(each, advantage=9.0) for each in rows(1, groups=2)])
    assert [each.load().advantage for each in store_batch(tmp_path, 1, rows(1, groups=2))] == [
        each.advantage for each in rows(1, groups=2)
    ]


def test_only_complete_batches_are_listed_and_a_checkpoint_deletes_them(tmp_path: Path) -> None:
    journal = BatchJournal(tmp_path)
    for step in (1, 2, 3):
        journal.write_group(GroupAccepted(step, 0, 0, tuple(rows(step, groups=1))))
        if step < 3:
            journal.write(step, b"batch")
    assert journal.list_steps() == [1, 2]
    journal.delete_up_to(1)
    assert journal.list_steps() == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]


def test_the_metrics_of_a_step_are_kept_until_the_next_checkpoint(tmp_path: Path) -> None:
    journal = BatchJournal(tmp_path)
    assert journal.read_metrics(2) == {}
    journal.write_metrics(2, {"loss": 0.5, "ratio_max": float("inf")})
    journal.delete_up_to(2)
    assert BatchJournal(tmp_path).read_metrics(2) == {"loss": 0.5, "ratio_max": float("inf")}
    journal.write_metrics(3, {"loss": 0.25})
    assert (journal.read_metrics(2)["loss"], journal.read_metrics(3)) == (0.5, {"loss": 0.25})
    journal.delete_up_to(3)
    assert (journal.read_metrics(2), journal.read_metrics(3)) == ({}, {"loss": 0.25})
    journal.clear()
    assert journal.read_metrics(3) == {}


def test_tokens_of_a_forbidden_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="tokens of version 1 to train on: step 1 takes version 0"):
        BatchJournal(tmp_path).write_group(GroupAccepted(1, 0, 0, tuple(rows(2))))
    BatchJournal(tmp_path, max_staleness=1).write_group(GroupAccepted(2, 0, 0, tuple(rows(1))))
    with pytest.raises(FileNotFoundError):
        BatchJournal(tmp_path).read_indexes(BatchReady(1, (BatchGroup(0, 1),)))


@given(st.lists(st.integers(0, 3 * MAX_PART_BYTES // 13), min_size=1, max_size=8))
def test_the_parts_of_a_group_are_bounded_and_contain_every_row(lengths: list[int]) -> None:
    class Record:
        def __init__(self, num_tokens: int) -> None:
            self.num_tokens = num_tokens

    samples = [replace(row(number, 7, 0), record=Record(length)) for number, length in enumerate(lengths)]
    parts = split_accepted_group(4, 7, samples)
    assert [(part.step, part.group_id, part.part) for part in parts] == [(4, 7, number) for number in range(len(parts))]
    assert [sample for part in parts for sample in part.samples] == samples
    for part in parts:
        size = 13 * sum(sample.record.num_tokens for sample in part.samples)
        assert size <= MAX_PART_BYTES or len(part.samples) == 1


class LoadedShare(NamedTuple):
    are_from_files: bool
    sequences: list[tuple[int, list[int]]]  # trajectory id and token ids


def load_share(ranks: RankGroup, ranks_per_node: int, folder: Path) -> LoadedShare:
    """Exchange samples, and load the samples of this rank. On later nodes the files are missing."""
    ranks = ranks._replace(local_world_size=ranks_per_node)
    sample_exchange.PIECE_BYTES = 100  # so that a rank needs several pieces
    stored = broadcast_object(ranks, store_batch(folder, 1, rows(1, groups=6)) if ranks.is_leader else None)
    if ranks.node:
        stored = [each._replace(path=folder / "missing") for each in stored]
    minibatches = [
        (each, split_micro_batches(each, ranks.world_size, 64))
        for each in build_rl_minibatches(stored, 2, seed=0, step=1)
    ]
    share = [
        sequences[index]
        for (_, shares), sequences in zip(
            minibatches, sample_exchange.exchange_samples(ranks, minibatches), strict=True
        )
        for indices in shares[ranks.rank]
        for index in indices
    ]
    found = [(each.trajectory_id, each.load().token_ids.tolist()) for each in share]
    return LoadedShare(all(each.content is None for each in share), found)


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_node", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_ranks_on_other_nodes_receive_their_samples(ranks_per_node: int, tmp_path: Path) -> None:
    """Only the first of two nodes has the files."""
    loaded = run_ranks(4, load_share, ranks_per_node, tmp_path)
    assert [share.are_from_files for share in loaded] == [rank < ranks_per_node for rank in range(4)]
    samples = {each.trajectory_id: build_rl_sequence(each).token_ids.tolist() for each in rows(1, groups=6)}
    found = [pair for share in loaded for pair in share.sequences]
    assert dict(found) == samples
    assert len(found) == len(samples)
