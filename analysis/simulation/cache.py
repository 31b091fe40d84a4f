"""A simulated engine's pages: who holds how many, and whose go when they run out."""

from __future__ import annotations

from collections import OrderedDict


class Sequence:
    """A trajectory's tokens on one engine, from its first request there until they are forgotten."""

    def __init__(self, trajectory_id: int, group_id: int, prompt_tokens: int, page_tokens: int) -> None:
        self.trajectory_id = trajectory_id
        self.group_id = group_id
        self.shared_pages = prompt_tokens // page_tokens  # of the prompt; its siblings' too
        self.lease = 0  # the latest under which a request came
        self.turn = 0
        self.tokens = 0  # while it does not decode; else its offset to the engine's steps
        self.cached_tokens = 0  # computed, of them, while it does not decode
        self.pages = 0  # its own, while it does not decode
        self.has_pages = False
        self.began_at = 0  # tokens that its request came with
        self.goal = 0  # tokens with which the request ends
        self.stops = False  # by itself, and not because its lease ends
        self.left = 0  # to prefill
        self.joined = 0  # times, so that an old end can be told from the present one
        self.since = 0.0  # when it came, or was admitted


class Pages:
    """Of one engine. Evictions and the tokens in them are counted."""

    def __init__(self, capacity: int, page_tokens: int) -> None:
        self.capacity = capacity
        self.page_tokens = page_tokens
        self.used = 0
        self.parked: OrderedDict[int, Sequence] = (
            OrderedDict()
        )  # cached and not running, the one used longest ago first
        self.reclaimable = 0  # own pages of the parked
        self.evictions = 0
        self.evicted_tokens = 0
        self._members: dict[int, int] = {}  # of a group, with pages here

    def own(self, sequence: Sequence, tokens: int) -> int:
        return -(-tokens // self.page_tokens) - sequence.shared_pages

    def missing(self, sequence: Sequence, tokens: int) -> int:
        """Pages that it needs, to hold so many tokens, beyond what there is for it."""
        shared = 0 if sequence.group_id in self._members else sequence.shared_pages
        return self.own(sequence, tokens) - sequence.pages + shared

    def room_for(self, sequence: Sequence) -> int:
        """Free pages, and those of parked caches but its own."""
        parked = sequence.pages if sequence.trajectory_id in self.parked else 0
        return self.capacity - self.used + self.reclaimable - parked

    def prefix(self, sequence: Sequence) -> int:
        """Tokens that a request need not compute: its own cache, or its siblings' prompt. The last token is none of them:
        the next one is drawn from what it computes."""
        cached = sequence.cached_tokens
        if not sequence.has_pages and sequence.group_id in self._members:
            cached = sequence.shared_pages * self.page_tokens
        return min(cached, sequence.tokens - 1)

    def take(self, sequence: Sequence, tokens: int) -> None:
        """Its pages for so many tokens; other caches go for them where they must."""
        if self.parked.pop(sequence.trajectory_id, None) is not None:
            self.reclaimable -= sequence.pages
        self.used += self.missing(sequence, tokens)
        sequence.pages = self.own(sequence, tokens)
        if not sequence.has_pages:
            sequence.has_pages = True
            self._members[sequence.group_id] = self._members.get(sequence.group_id, 0) + 1
        self.evict()

    def park(self, sequence: Sequence) -> None:
        self.parked[sequence.trajectory_id] = sequence
        self.reclaimable += sequence.pages

    def evict(self, extra: int = 0) -> None:
        """Until the used pages and `extra` fit, or no cache is left: those used longest ago, from their ends."""
        while self.used + extra > self.capacity and self.parked:
            sequence = next(iter(self.parked.values()))
            pages = min(self.used + extra - self.capacity, sequence.pages)
            self.evictions += 1
            self.used -= pages
            self.reclaimable -= pages
            sequence.pages -= pages
            kept = min(sequence.cached_tokens, (sequence.shared_pages + sequence.pages) * self.page_tokens)
            if sequence.pages == 0:
                kept = 0
                self.drop(sequence)
            self.evicted_tokens += sequence.cached_tokens - kept
            sequence.cached_tokens = kept

    def drop(self, sequence: Sequence) -> None:
        """All that it has."""
        if not sequence.has_pages:
            return
        if self.parked.pop(sequence.trajectory_id, None) is not None:
            self.reclaimable -= sequence.pages
        self.used -= sequence.pages
        sequence.pages, sequence.has_pages = 0, False
        members = self._members[sequence.group_id] - 1
        if members:
            self._members[sequence.group_id] = members
        else:
            del self._members[sequence.group_id]
            self.used -= sequence.shared_pages
