"""Distributes the sequences of a minibatch over the ranks as micro batches of similar cost.

All ranks start a micro batch at about the same time, because each micro batch gathers parameters: ranks with a cheaper
micro batch wait. So all micro batches of a minibatch are planned together, sorted by cost, and distributed in rounds of
one per rank. The cost of a sequence of T tokens is T + T^2 / attention_tokens.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from asterism.engine.learner.batches.training_sequence import SequenceSource


def split_micro_batches(
    sequences: Sequence[SequenceSource],
    num_ranks: int,
    micro_batch_tokens: int,
    attention_tokens: float = math.inf,
) -> list[list[list[int]]]:
    """Return each rank's micro batches, as lists of indices. Every rank has the same number of them, at least one.

    A micro batch has at most `micro_batch_tokens`; a longer sequence has its own. Micro batches can be empty.
    Sequences without a token in the loss are left out. `attention_tokens`: the length at which attention costs as much
    as all other products. The most expensive micro batches come first.
    """
    lengths = {index: each.num_tokens - 1 for index, each in enumerate(sequences) if each.num_loss_tokens}
    longest_first = sorted(lengths, key=lambda index: (-lengths[index], index))
    costs = {index: length * (1 + length / attention_tokens) for index, length in lengths.items()}
    densest = _fill_densely(longest_first, lengths, micro_batch_tokens)
    num_rounds = max(1, math.ceil(len(densest) / num_ranks))
    evenly = _fill_evenly(longest_first, lengths, costs, micro_batch_tokens, num_rounds * num_ranks)
    micro_batches = densest + [[]] * (num_rounds * num_ranks - len(densest)) if evenly is None else evenly
    micro_batches.sort(key=lambda indices: -sum(costs[index] for index in indices))
    return [micro_batches[rank::num_ranks] for rank in range(num_ranks)]


def _fill_densely(longest_first: Sequence[int], lengths: dict[int, int], most_tokens: int) -> list[list[int]]:
    """Fill few micro batches: each sequence joins the micro batch with the least room that suffices (best fit)."""
    micro_batches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # free tokens and index of each micro batch, ascending
    for index in longest_first:
        place = bisect_left(rooms, (lengths[index], 0))
        if place < len(rooms):
            room, number = rooms.pop(place)
        else:
            room, number = most_tokens, len(micro_batches)
            micro_batches.append([])
        micro_batches[number].append(index)
        insort(rooms, (room - lengths[index], number))
    return micro_batches


def _fill_evenly(
    longest_first: Sequence[int], lengths: dict[int, int], costs: dict[int, float], most_tokens: int, count: int
) -> list[list[int]] | None:
    """Add each sequence to the cheapest of `count` micro batches with room. None if a sequence fits nowhere."""
    micro_batches: list[list[int]] = [[] for _ in range(count)]
    tokens, totals = np.zeros(count, np.int64), np.zeros(count)
    for index in longest_first:
        # An empty micro batch has room for a sequence of any length.
        has_room = (tokens + lengths[index] <= most_tokens) | (tokens == 0)
        number = int(np.where(has_room, totals, np.inf).argmin())
        if not has_room[number]:
            return None
        micro_batches[number].append(index)
        tokens[number] += lengths[index]
        totals[number] += costs[index]
    return micro_batches
