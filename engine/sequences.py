"""One sequence in the embedded engine: its tokens, its pages, and how far they are filled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.contract import EngineFailure, Generation, GenerationRequest

Outcome = tuple[int, Generation | EngineFailure]  # sequence_id, what its generate returns or raises

NO_LOGPROBS = np.zeros(0, np.float32)


class Sequence:
    """It waits, reads its tokens, runs in a row, or is parked; while it runs, its row has its newest tokens."""

    def __init__(self, sequence_id: int) -> None:
        self.sequence_id = sequence_id
        self.request: GenerationRequest | None = None  # None while parked
        self.arrival = 0  # counts requests: who came last is preempted first
        self.token_ids: NDArray[np.int32] = np.zeros(0, np.int32)
        self.logprobs = NO_LOGPROBS  # of those behind the request's own
        self.versions: list[tuple[int, int]] = []  # (from this position on, policy version)
        self.pages: list[int] = []
        self.cached = 0  # so many of its first tokens have keys and values in its pages
        self.found: int | None = None  # of the request's tokens were cached as it began; None before
        self.computed = 0  # so many had them at some time, under these weights or while it ran
        self.stale = False  # some of them are of older weights: for itself alone
        self.row = -1
        self.joined = 0  # counts those that began to run, again after preemption

    def ask(self, request: GenerationRequest, arrival: int) -> None:
        """Its next request. Of what is cached, that counts which stands before its last token and is the same."""
        last = len(request.token_ids) - 1
        same = _common(self.token_ids, request.token_ids)
        self.cached, self.computed = min(self.cached, same, last), min(self.computed, same)
        self.request, self.arrival, self.found = request, arrival, None
        self.token_ids, self.logprobs, self.versions = request.token_ids, NO_LOGPROBS, []

    def begin(self) -> None:
        """It has pages; `cached` tokens of them hold what it needs. Again after a preemption, which changes nothing."""
        if self.found is None:
            self.found = self.cached

    def at(self, position: int, version: int) -> None:
        """Tokens from `position` on are of this version."""
        self.versions.append((position, version))

    def outcome(self, finish: Literal["abort"] | None) -> Outcome:
        """The pending request's, which is answered by it. EngineFailure if logits were not finite."""
        assert self.request is not None
        request, self.request = self.request, None
        if not np.isfinite(self.logprobs).all():
            return self.sequence_id, EngineFailure(f"sequence {self.sequence_id}: logits are not finite")
        first, end = len(request.token_ids), len(self.token_ids)
        versions = np.empty(end - first, np.int32)
        for since, version in self.versions:
            versions[max(since - first, 0) :] = version
        stopped = end > first and int(self.token_ids[-1]) in request.stop_token_ids
        reason = finish or ("stop" if stopped else "length")
        ids = self.token_ids[first:].copy()
        return self.sequence_id, Generation(ids, self.logprobs, versions, reason, self.found or 0)


class Stretch(NamedTuple):
    """Tokens [start, end) of a sequence, to be read in this step."""

    sequence: Sequence
    start: int
    end: int

    def slots(self, page_tokens: int) -> NDArray[np.int64]:
        positions = np.arange(self.start, self.end)
        return np.array(self.sequence.pages)[positions // page_tokens] * page_tokens + positions % page_tokens


def pieces(stretches: list[Stretch]) -> Iterator[tuple[int, Stretch]]:
    """Each with the number of tokens before it."""
    first = 0
    for stretch in stretches:
        yield first, stretch
        first += stretch.end - stretch.start


def _common(ids: NDArray[np.int32], others: NDArray[np.int32]) -> int:
    """How many of the first ids are the same."""
    count = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:count] != others[:count])
    return int(differ[0]) if len(differ) else count
