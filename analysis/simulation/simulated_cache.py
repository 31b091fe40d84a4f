"""The state of a simulated engine: its sequences, its paged KV cache, and its decode batch."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from analysis.simulation.cluster_model import StepCostModel


class SimulatedSequence:
    """A trajectory's tokens on one engine, from its first request until its cache is released.

    `tokens`, `cached_tokens` and `own_pages` are valid while the sequence does not decode. While it
    decodes, `tokens` is an offset: the DecodeBatch subtracts its number of completed steps.
    """

    def __init__(self, trajectory_id: int, group_id: int, prompt_tokens: int, page_tokens: int) -> None:
        self.trajectory_id = trajectory_id
        self.group_id = group_id
        self.shared_pages = prompt_tokens // page_tokens  # full pages of the prompt, shared by siblings
        self.lease = 0  # of the latest request
        self.turn = 0
        self.tokens = 0
        self.cached_tokens = 0  # tokens with computed KV entries
        self.own_pages = 0  # pages besides the shared ones
        self.has_pages = False
        self.request_tokens = 0  # tokens in the request
        self.target_tokens = 0  # tokens at the end of the request
        self.reaches_stop = False  # the request ends with a stop token, not with its lease
        self.remaining_prefill = 0  # tokens
        self.num_joins = 0  # of a decode batch; marks heap entries of earlier joins as stale
        self.phase_started_s = 0.0  # arrival, or admission


class SimulatedKvCache:
    """The pages of one engine. Counts evictions and evicted tokens."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.used_pages = 0
        # Caches of sequences that are not running, the least recently used first.
        self.idle: OrderedDict[int, SimulatedSequence] = OrderedDict()
        self.reclaimable_pages = 0  # own pages of the idle caches
        self.evictions = 0
        self.evicted_tokens = 0
        self._group_members: dict[int, int] = {}  # sequences with pages here, by group

    def count_own_pages(self, sequence: SimulatedSequence, tokens: int) -> int:
        return -(-tokens // self.page_tokens) - sequence.shared_pages

    def count_missing_pages(self, sequence: SimulatedSequence, tokens: int) -> int:
        """Pages that the sequence lacks for holding so many tokens."""
        shared = 0 if sequence.group_id in self._group_members else sequence.shared_pages
        return self.count_own_pages(sequence, tokens) - sequence.own_pages + shared

    def count_available_pages(self, sequence: SimulatedSequence) -> int:
        """Free pages, and pages of the idle caches of other sequences."""
        own_idle_pages = sequence.own_pages if sequence.trajectory_id in self.idle else 0
        return self.num_pages - self.used_pages + self.reclaimable_pages - own_idle_pages

    def count_cached_prefix(self, sequence: SimulatedSequence) -> int:
        """Tokens that the prefill of a request can skip: its own cache, or its siblings' prompt.

        The last token is always computed, because the next one is sampled from its logits.
        """
        cached = sequence.cached_tokens
        if not sequence.has_pages and sequence.group_id in self._group_members:
            cached = sequence.shared_pages * self.page_tokens
        return min(cached, sequence.tokens - 1)

    def allocate(self, sequence: SimulatedSequence, tokens: int) -> None:
        """Allocate pages for so many tokens; evict other caches if necessary."""
        if self.idle.pop(sequence.trajectory_id, None) is not None:
            self.reclaimable_pages -= sequence.own_pages
        self.used_pages += self.count_missing_pages(sequence, tokens)
        sequence.own_pages = self.count_own_pages(sequence, tokens)
        if not sequence.has_pages:
            sequence.has_pages = True
            self._group_members[sequence.group_id] = self._group_members.get(sequence.group_id, 0) + 1
        self.evict()

    def mark_idle(self, sequence: SimulatedSequence) -> None:
        self.idle[sequence.trajectory_id] = sequence
        self.reclaimable_pages += sequence.own_pages

    def evict(self, extra: int = 0) -> None:
        """Evict the least recently used caches, from their ends, until `extra` pages are free or no cache is left."""
        while self.used_pages + extra > self.num_pages and self.idle:
            sequence = next(iter(self.idle.values()))
            pages = min(self.used_pages + extra - self.num_pages, sequence.own_pages)
            self.evictions += 1
            self.used_pages -= pages
            self.reclaimable_pages -= pages
            sequence.own_pages -= pages
            remaining_tokens = min(
                sequence.cached_tokens, (sequence.shared_pages + sequence.own_pages) * self.page_tokens
            )
            if sequence.own_pages == 0:
                remaining_tokens = 0
                self.free(sequence)
            self.evicted_tokens += sequence.cached_tokens - remaining_tokens
            sequence.cached_tokens = remaining_tokens

    def free(self, sequence: SimulatedSequence) -> None:
        """Free all pages of the sequence."""
        if not sequence.has_pages:
            return
        if self.idle.pop(sequence.trajectory_id, None) is not None:
            self.reclaimable_pages -= sequence.own_pages
        self.used_pages -= sequence.own_pages
        sequence.own_pages, sequence.has_pages = 0, False
        members = self._group_members[sequence.group_id] - 1
        if members:
            self._group_members[sequence.group_id] = members
        else:
            del self._group_members[sequence.group_id]
            self.used_pages -= sequence.shared_pages


class DecodeBatch:
    """The running sequences of one engine, in the order in which they joined.

    Between two changes of the batch no step is simulated: the duration of the next n steps, and the
    pages that they take, have a closed form.
    """

    def __init__(self, page_tokens: int, cost: StepCostModel) -> None:
        self.sequences: OrderedDict[int, SimulatedSequence] = OrderedDict()
        self.completed_steps = 0
        self.kv_tokens = 0  # of the running sequences
        self._page_tokens = page_tokens
        self._cost = cost
        self._page_offset_counts = [0] * page_tokens  # sequences by (tokens - steps) modulo a page
        self._finish_heap: list[tuple[int, int, int]] = []  # (step, trajectory id, num_joins)

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, trajectory_id: int) -> bool:
        return trajectory_id in self.sequences

    def add(self, sequence: SimulatedSequence) -> None:
        sequence.num_joins += 1
        self.sequences[sequence.trajectory_id] = sequence
        self.kv_tokens += sequence.tokens
        finish_step = self.completed_steps + sequence.target_tokens - sequence.tokens
        heapq.heappush(self._finish_heap, (finish_step, sequence.trajectory_id, sequence.num_joins))
        sequence.tokens -= self.completed_steps
        self._page_offset_counts[sequence.tokens % self._page_tokens] += 1

    def remove(self, sequence: SimulatedSequence) -> None:
        del self.sequences[sequence.trajectory_id]
        self._page_offset_counts[sequence.tokens % self._page_tokens] -= 1
        sequence.tokens += self.completed_steps
        self.kv_tokens -= sequence.tokens

    def get_last(self) -> SimulatedSequence:
        return next(reversed(self.sequences.values()))

    def find_finished(self) -> SimulatedSequence | None:
        """A sequence that has reached its target."""
        self._drop_stale_finishes()
        if self._finish_heap and self._finish_heap[0][0] <= self.completed_steps:
            return self.sequences[self._finish_heap[0][1]]
        return None

    def _drop_stale_finishes(self) -> None:
        """Remove the heap's first entries while they are of sequences that have left the batch."""
        while self._finish_heap:
            _, trajectory_id, num_joins = self._finish_heap[0]
            sequence = self.sequences.get(trajectory_id)
            if sequence is not None and sequence.num_joins == num_joins:
                return
            heapq.heappop(self._finish_heap)

    def complete_steps(self, steps: int) -> None:
        self.completed_steps += steps
        self.kv_tokens += len(self.sequences) * steps

    def compute_steps_s(self, steps: int) -> float:
        return self._cost.compute_steps_s(len(self.sequences), self.kv_tokens, steps)

    def count_new_pages(self, steps: int) -> int:
        """New pages that the running sequences take in so many steps."""
        page, offset_counts = self._page_tokens, self._page_offset_counts
        # Sequences with this offset take a page in the next step, with one less in the step after it.
        first = -self.completed_steps % page
        if steps == 1:
            return offset_counts[first]
        cycles, rest = divmod(steps, page)
        return cycles * len(self.sequences) + sum([offset_counts[first - step] for step in range(rest)])

    def count_steps_ahead(self, available_pages: int) -> int:
        """Steps until a turn ends or pages run out; at least 1, for which there is room."""
        self._drop_stale_finishes()
        upper = self._finish_heap[0][0] - self.completed_steps
        if self.count_new_pages(upper) <= available_pages:
            return upper
        lower = 1
        while upper - lower > 1:
            middle = (lower + upper) // 2
            if self.count_new_pages(middle) <= available_pages:
                lower = middle
            else:
                upper = middle
        return lower
