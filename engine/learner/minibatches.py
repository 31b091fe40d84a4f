"""Builds training sequences, minibatches and padded micro batches; all ranks together train on the same tokens.

A minibatch (one optimizer update) is dealt to the ranks by length, and each rank splits its share into micro batches
(one forward and backward pass). The result does not depend on the order in which rows arrived; no row is dropped.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bus.messages import TrainingSample
from configs.algorithm import LossMean
from policies.seeded_random import shuffle_range


class TrainingSequence(NamedTuple):
    """T tokens, prompt included."""

    token_ids: NDArray[np.int32]  # [T]; the last token is in the loss
    loss_mask: NDArray[np.bool_]  # [T]; false for the first token, which has no prediction
    logprobs: NDArray[np.float32]  # [T], under the policy that generated the token; zeros in the cold start
    advantage: float
    group_id: int = 0

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


def build_training_sequence(
    token_ids: NDArray[np.int32],
    loss_mask: NDArray[np.bool_],
    logprobs: NDArray[np.float32],
    advantage: float,
    group_id: int = 0,
) -> TrainingSequence:
    """Drops the tokens after the last token in the loss. Raises ValueError if the arrays differ in length."""
    if not len(token_ids) == len(loss_mask) == len(logprobs):
        raise ValueError(f"{len(token_ids)} token ids, {len(loss_mask)} mask entries, {len(logprobs)} logprobs")
    counted = loss_mask.copy()
    counted[:1] = False
    end = int(np.flatnonzero(counted)[-1]) + 1 if counted.any() else 0
    return TrainingSequence(token_ids[:end], counted[:end], logprobs[:end], advantage, group_id)


def build_sft_sequence(token_ids: Iterable[int], loss_mask: Iterable[int | bool]) -> TrainingSequence:
    ids = np.fromiter(token_ids, np.int32)
    return build_training_sequence(ids, np.fromiter(loss_mask, np.bool_), np.zeros(len(ids), np.float32), 1.0)


def build_rl_sequence(row: TrainingSample) -> TrainingSequence:
    """Raises ValueError, naming the trajectory, if the row's arrays differ in length."""
    try:
        return build_training_sequence(
            np.frombuffer(row.record.token_ids, "<i4"),
            np.frombuffer(row.record.loss_mask, np.uint8).astype(np.bool_),
            np.frombuffer(row.record.logprobs, "<f4"),
            row.advantage,
            row.group_id,
        )
    except ValueError as error:
        raise ValueError(f"trajectory {row.trajectory_id}: {error}") from error


def build_rl_minibatches(
    rows: Sequence[TrainingSample], num_minibatches: int, seed: int, step: int
) -> list[list[TrainingSequence]]:
    """At most `num_minibatches` minibatches of whole groups, of similar sizes, in seeded order."""
    groups: defaultdict[int, list[TrainingSample]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.group_id, row.trajectory_id)):
        groups[row.group_id].append(row)
    in_order = list(groups.values())
    shuffled = [in_order[index] for index in shuffle_range(len(in_order), seed, step)]
    parts = min(num_minibatches, len(shuffled))
    cuts = [len(shuffled) * part // parts for part in range(parts + 1)] if parts else []
    return [[build_rl_sequence(row) for group in shuffled[start:end] for row in group] for start, end in pairwise(cuts)]


class SftSampler:
    """The sequences of each step of the cold start: one permutation per epoch; a batch may span two epochs."""

    def __init__(self, num_sequences: int, batch_size: int, seed: int) -> None:
        if num_sequences == 0:
            raise ValueError("the cold start has no sequence to train on")
        self._num_sequences = num_sequences
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def get_batch(self, step: int) -> list[int]:
        """Indices of the sequences of `step`, counted from 0: a function of seed and step."""
        first = step * self._batch_size
        return [self._get_index(position) for position in range(first, first + self._batch_size)]

    def _get_index(self, position: int) -> int:
        epoch, offset = divmod(position, self._num_sequences)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffle_range(self._num_sequences, self._seed, epoch)
        return self._order[offset]


def compute_token_weights(
    sequences: Sequence[TrainingSequence], loss_mean: LossMean, max_response_tokens: int
) -> list[float]:
    """For each sequence of a minibatch the weight of one of its loss tokens; the weights of all tokens add up to 1.

    tokens    the mean over all tokens. Source: DAPO, arXiv 2503.14476, equation 12, over the minibatch
    group     the mean over the tokens of a group, then over groups. Source: rStar2-Agent, arXiv 2508.20722, section 3
    sequence  the mean over the tokens of a sequence, then over sequences. Source: GRPO, arXiv 2402.03300, equation 3
    constant  the sum over the tokens, divided by max_response_tokens and the number of sequences: these weights add up
              to less than 1. Source: Dr. GRPO, arXiv 2503.20783, section 3.2
    """
    counts = [sequence.num_loss_tokens for sequence in sequences]
    by_group: defaultdict[int, int] = defaultdict(int)
    for sequence, count in zip(sequences, counts, strict=True):
        by_group[sequence.group_id] += count
    num_tokens, num_sequences = max(1, sum(counts)), max(1, sum(map(bool, counts)))
    num_groups = max(1, sum(map(bool, by_group.values())))
    divisors = {
        "tokens": [num_tokens for _ in sequences],
        "group": [num_groups * by_group[sequence.group_id] for sequence in sequences],
        "sequence": [num_sequences * count for count in counts],
        "constant": [num_sequences * max_response_tokens for _ in sequences],
    }
    return [1.0 / max(1, divisor) for divisor in divisors[loss_mean]]


def split_micro_batches(
    sequences: Sequence[TrainingSequence], num_ranks: int, micro_batch_tokens: int
) -> list[list[list[int]]]:
    """For each rank its micro batches, as lists of indices; every rank has the same number of them, at least one.

    A micro batch has at most `micro_batch_tokens` padded tokens; a longer sequence gets its own. Some may be empty.
    Sequences without a token in the loss are left out.
    """
    counted = [index for index, sequence in enumerate(sequences) if sequence.num_loss_tokens]
    longest_first = sorted(counted, key=lambda index: (-len(sequences[index].token_ids), index))
    lengths = [len(sequence.token_ids) - 1 for sequence in sequences]
    by_rank = [
        _pack_micro_batches(longest_first[rank::num_ranks], lengths, micro_batch_tokens) for rank in range(num_ranks)
    ]
    most = max(1, *(len(micro_batches) for micro_batches in by_rank))
    return [micro_batches + [[]] * (most - len(micro_batches)) for micro_batches in by_rank]


def _pack_micro_batches(longest_first: list[int], lengths: list[int], micro_batch_tokens: int) -> list[list[int]]:
    micro_batches: list[list[int]] = []
    width = 0
    for index in longest_first:
        if not micro_batches or (len(micro_batches[-1]) + 1) * width > micro_batch_tokens:
            micro_batches.append([])
            width = lengths[index]
        micro_batches[-1].append(index)
    return micro_batches


class MicroBatch(NamedTuple):
    """B sequences without their last token, padded on the right to T; N tokens in the loss."""

    token_ids_BT: Tensor  # int64
    positions_N: Tensor  # int64, indices into the flattened [B * T] of the hidden states that predict the tokens
    targets_N: Tensor  # int64
    logprobs_N: Tensor
    advantages_N: Tensor
    sequences_N: Tensor  # int64, the sequence of each loss token
    weights_N: Tensor  # float64, of each token in the minibatch's mean
    num_sequences: int


def build_micro_batch(sequences: Sequence[TrainingSequence], token_weights: Sequence[float]) -> MicroBatch:
    """`token_weights`: of each token of a sequence, in the minibatch's mean.

    Without sequences: one padding token and no loss, for the step's collectives.
    """
    width = max((len(sequence.token_ids) - 1 for sequence in sequences), default=1)
    token_ids_BT = np.zeros((max(1, len(sequences)), width), np.int64)
    positions: list[NDArray[np.int64]] = []
    for row, sequence in enumerate(sequences):
        token_ids_BT[row, : len(sequence.token_ids) - 1] = sequence.token_ids[:-1]
        positions.append(np.flatnonzero(sequence.loss_mask) - 1 + row * width)
    targets = [sequence.token_ids[sequence.loss_mask] for sequence in sequences]
    logprobs = [sequence.logprobs[sequence.loss_mask] for sequence in sequences]
    numbers = [np.full(sequence.num_loss_tokens, row, np.int64) for row, sequence in enumerate(sequences)]
    advantages = [np.full(sequence.num_loss_tokens, sequence.advantage, np.float32) for sequence in sequences]
    pairs = zip(sequences, token_weights, strict=True)
    weights = [np.full(sequence.num_loss_tokens, weight, np.float64) for sequence, weight in pairs]
    return MicroBatch(
        torch.from_numpy(token_ids_BT),
        _concatenate(positions, np.int64),
        _concatenate(targets, np.int64),
        _concatenate(logprobs, np.float32),
        _concatenate(advantages, np.float32),
        _concatenate(numbers, np.int64),
        _concatenate(weights, np.float64),
        len(sequences),
    )


def _concatenate(parts: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate([*parts, np.zeros(0, dtype)], dtype=dtype))
