"""Distributes the sequences of a minibatch over the ranks as micro batches of similar cost.

All ranks start a micro batch at about the same time, because each micro batch gathers parameters: ranks with a cheaper
micro batch wait. So all micro batches of a minibatch are planned together, sorted by cost, and distributed in rounds of
one per rank. The cost of a sequence of T tokens is T + T^2 / attention_tokens.

Siblings (siblings.py) cost less together, but large units are harder to distribute. So there are several plans, with
whole groups of siblings, with parts of them, and with single sequences, and the cheapest plan is chosen.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from asterism.engine.learner.batches.siblings import Siblings, find_siblings, make_siblings
from asterism.engine.learner.batches.training_sequence import SequenceSource

_PART_SHARES = (1, 2, 4)  # parts of siblings have at most the tokens of a micro batch, divided by these numbers


def split_micro_batches(
    sequences: Sequence[SequenceSource],
    num_ranks: int,
    micro_batch_tokens: int,
    attention_tokens: float = math.inf,
    *,
    shares_prompts: bool = False,
) -> list[list[list[int]]]:
    """Return each rank's micro batches, as lists of indices. Every rank has the same number of them, at least one.

    A micro batch has at most `micro_batch_tokens`; a longer sequence has its own. Micro batches can be empty.
    Sequences without a token in the loss are left out. `attention_tokens`: the length at which attention costs as much
    as all other products. The most expensive micro batches come first. With `shares_prompts`, the tokens of a prompt
    that several sequences of a micro batch have count once.
    """
    plans = [
        _plan(units, num_ranks, micro_batch_tokens, attention_tokens)
        for units in _iter_units(sequences, micro_batch_tokens, shares_prompts=shares_prompts)
    ]
    micro_batches = min(plans, key=lambda plan: plan.cost).micro_batches
    return [micro_batches[rank::num_ranks] for rank in range(num_ranks)]


def _iter_units(
    sequences: Sequence[SequenceSource], micro_batch_tokens: int, *, shares_prompts: bool
) -> Iterator[list[Siblings]]:
    """Yield several divisions of the sequences into units that stay together."""
    counted = [index for index, each in enumerate(sequences) if each.num_loss_tokens]
    groups = find_siblings(sequences, counted, shares_prompts=shares_prompts)
    if len(groups) < len(counted):
        for share in _PART_SHARES:
            most_tokens = micro_batch_tokens // share
            yield [part for group in groups for part in _cut_siblings(sequences, group, most_tokens)]
    yield [make_siblings(sequences, [index]) for index in counted]


def _cut_siblings(sequences: Sequence[SequenceSource], group: Siblings, most_tokens: int) -> list[Siblings]:
    """Cut siblings into few parts with at most `most_tokens`; a longer sequence has its own part."""
    lengths = dict(zip(group.indices, group.own_tokens, strict=True))
    longest_first = sorted(lengths, key=lambda index: (-lengths[index], index))
    parts = _fill_densely(longest_first, lengths, most_tokens - group.prompt_tokens)
    return [make_siblings(sequences, part) for part in parts]


class _Plan(NamedTuple):
    micro_batches: list[list[int]]
    cost: float  # sum over the rounds of the most expensive micro batch


def _plan(units: Sequence[Siblings], num_ranks: int, micro_batch_tokens: int, attention_tokens: float) -> _Plan:
    lengths = {number: unit.num_tokens for number, unit in enumerate(units)}
    longest_first = sorted(lengths, key=lambda number: (-lengths[number], units[number].indices[0]))
    costs = {number: unit.compute_cost(attention_tokens) for number, unit in enumerate(units)}
    densest = _fill_densely(longest_first, lengths, micro_batch_tokens)
    num_rounds = max(1, math.ceil(len(densest) / num_ranks))
    evenly = _fill_evenly(longest_first, lengths, costs, micro_batch_tokens, num_rounds * num_ranks)
    filled = densest + [[]] * (num_rounds * num_ranks - len(densest)) if evenly is None else evenly
    totals = {number: sum(costs[unit] for unit in each) for number, each in enumerate(filled)}
    order = sorted(totals, key=lambda number: -totals[number])
    micro_batches = [[index for unit in filled[number] for index in units[unit].indices] for number in order]
    return _Plan(micro_batches, sum(totals[number] for number in order[::num_ranks]))


def _fill_densely(longest_first: Sequence[int], lengths: Mapping[int, int], most_tokens: int) -> list[list[int]]:
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
