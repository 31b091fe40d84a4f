"""Builds minibatches and packed micro batches.

A minibatch is one optimizer update. engine/learner/batches/packing.py distributes it over the ranks as micro
batches, each with one forward and backward pass. The result does not depend on the order of rows; no row is dropped.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asterism.configs.schema.learner_config import LossMean
from asterism.engine.learner.batches.siblings import find_siblings
from asterism.engine.learner.batches.training_sequence import SequenceSource, Source, TrainingSequence
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.model.packed_attention import Segments, build_families
from asterism.policies.seeded_random import shuffle_range


def build_rl_minibatches(sequences: Sequence[Source], num_minibatches: int, seed: int, step: int) -> list[list[Source]]:
    """Build at most `num_minibatches` minibatches of whole groups, of similar sizes, in seeded order."""
    groups: defaultdict[int, list[Source]] = defaultdict(list)
    for sequence in sorted(sequences, key=lambda each: (each.group_id, each.trajectory_id)):
        groups[sequence.group_id].append(sequence)
    in_order = list(groups.values())
    shuffled = [in_order[index] for index in shuffle_range(len(in_order), seed, step)]
    parts = min(num_minibatches, len(shuffled))
    cuts = [len(shuffled) * part // parts for part in range(parts + 1)] if parts else []
    return [[sequence for group in shuffled[start:end] for sequence in group] for start, end in pairwise(cuts)]


def compute_token_weights(
    sequences: Sequence[SequenceSource], loss_mean: LossMean, max_response_tokens: int
) -> list[float]:
    """Return each sequence's weight of one loss token. The weights of all loss tokens of a minibatch add up to 1.

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


class MicroBatch(NamedTuple):
    """Packed sequences without their last tokens: T tokens in all, N tokens in the loss. A shared prompt counts once."""

    token_ids_T: Tensor  # int64
    segments: Segments
    positions_N: Tensor  # int64, indices into [T] of the hidden states that predict the tokens
    targets_N: Tensor  # int64
    logprobs_N: Tensor
    advantages_N: Tensor
    sequences_N: Tensor  # int64, the sequence of each loss token
    weights_N: Tensor  # float64, weight of each token in the minibatch's mean
    groups_N: Tensor  # int64, the group of each loss token
    num_sequences: int


def map_tensors(batch: MicroBatch, change: Callable[[Tensor], Tensor]) -> MicroBatch:
    """Return a copy with `change` applied to each tensor."""

    def select(fields: dict[str, object]) -> dict[str, Any]:
        return {name: change(each) for name, each in fields.items() if isinstance(each, Tensor)}

    segments = batch.segments._replace(**select(batch.segments._asdict()))
    return batch._replace(segments=segments, **select(batch._asdict()))


class _PackedRow(NamedTuple):
    """The tokens of a micro batch, and for each sequence the positions in it that predict the loss tokens."""

    token_ids: list[NDArray[np.int32]]
    families: list[list[int]]  # lengths of a sequence, or of a shared prompt and its responses
    positions: list[NDArray[np.int64]]


def _pack(sequences: Sequence[TrainingSequence], *, shares_prompts: bool) -> _PackedRow:
    row, place = _PackedRow([], [], [np.zeros(0, np.int64)] * len(sequences)), 0
    for siblings in find_siblings(sequences, range(len(sequences)), shares_prompts=shares_prompts):
        prompt, prompt_place = siblings.prompt_tokens, place
        row.token_ids.append(sequences[siblings.indices[0]].token_ids[:prompt])
        place += prompt
        for index, own in zip(siblings.indices, siblings.own_tokens, strict=True):
            before = np.flatnonzero(sequences[index].loss_mask) - 1
            # The last token of a shared prompt predicts the first token of each response.
            row.positions[index] = before + np.where(before < prompt, prompt_place, place - prompt)
            row.token_ids.append(sequences[index].token_ids[prompt:-1])
            place += own
        row.families.append([each for each in (prompt, *siblings.own_tokens) if each])
    return row


def build_micro_batch(
    sequences: Sequence[TrainingSequence], token_weights: Sequence[float], *, shares_prompts: bool = False
) -> MicroBatch:
    """Pack sequences. `token_weights`: weight of one loss token of each sequence in the minibatch's mean.

    With `shares_prompts`, the tokens of a prompt that several sequences have are packed once. Without sequences, the
    micro batch has one token without loss, for the step's collectives.
    """
    row = _pack(sequences, shares_prompts=shares_prompts)
    targets = [sequence.token_ids[sequence.loss_mask] for sequence in sequences]
    logprobs = [sequence.logprobs[sequence.loss_mask] for sequence in sequences]
    numbers = [np.full(sequence.num_loss_tokens, row, np.int64) for row, sequence in enumerate(sequences)]
    advantages = [np.full(sequence.num_loss_tokens, sequence.advantage, np.float32) for sequence in sequences]
    pairs = zip(sequences, token_weights, strict=True)
    weights = [np.full(sequence.num_loss_tokens, weight, np.float64) for sequence, weight in pairs]
    groups = [np.full(sequence.num_loss_tokens, sequence.group_id, np.int64) for sequence in sequences]
    return MicroBatch(
        _concatenate(row.token_ids or [np.zeros(1, np.int32)], np.int64),
        build_families(row.families or [[1]]),
        _concatenate(row.positions, np.int64),
        _concatenate(targets, np.int64),
        _concatenate(logprobs, np.float32),
        _concatenate(advantages, np.float32),
        _concatenate(numbers, np.int64),
        _concatenate(weights, np.float64),
        _concatenate(groups, np.int64),
        len(sequences),
    )


def _concatenate(parts: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate([*parts, np.zeros(0, dtype)], dtype=dtype))


def load_micro_batch(
    sequences: Sequence[SequenceSource],
    weights: Sequence[float],
    indices: Sequence[int],
    device: torch.device,
    *,
    shares_prompts: bool,
) -> MicroBatch:
    """Load these sequences. For a GPU, page-locked memory lets the copy overlap GPU work."""
    loaded = [sequences[index].load() for index in indices]
    batch = build_micro_batch(loaded, [weights[index] for index in indices], shares_prompts=shares_prompts)
    return map_tensors(batch, Tensor.pin_memory) if device.type == "cuda" else batch


def iter_micro_batches(loads: Sequence[Callable[[], MicroBatch]], ranks: RankGroup) -> Generator[MicroBatch]:
    """Yield the micro batches on the rank's device, in order."""
    prefetched = iter_prefetched(loads)
    for _ in loads:
        with ranks.operation("load of samples"):
            batch = next(prefetched)
        yield map_tensors(batch, partial(Tensor.to, device=ranks.device, non_blocking=True))


def iter_prefetched(loads: Sequence[Callable[[], MicroBatch]]) -> Generator[MicroBatch]:
    """Yield the results of `loads`. A thread prepares the next result meanwhile. Raises the errors of the loads."""
    with ThreadPoolExecutor(1, "prefetch") as pool:
        pending = pool.submit(loads[0]) if loads else None
        for load in [*loads[1:], None]:
            if pending is None:
                return
            item = pending.result()
            pending = pool.submit(load) if load is not None else None
            yield item
