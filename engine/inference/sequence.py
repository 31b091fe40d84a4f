"""One sequence in the embedded engine: its tokens, its pages, and the number of its cached tokens."""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asterism.engine.contract import EngineFailure, Generation, GenerationRequest

SequenceOutcome = tuple[int, Generation | EngineFailure]  # sequence_id, and the result or exception of `generate`

NO_LOGPROBS = np.zeros(0, np.float32)


class Sequence:
    """A sequence that waits, prefills, runs in a row, or is idle. While it runs, only its row has its newest tokens."""

    def __init__(self, sequence_id: int) -> None:
        self.sequence_id = sequence_id
        self.request: GenerationRequest | None = None  # None while the sequence is idle
        self.arrival = 0  # number of the request; the newest request is preempted first
        self.token_ids: NDArray[np.int32] = np.zeros(0, np.int32)
        self.logprobs = NO_LOGPROBS  # logprobs of the generated tokens
        self.versions: list[tuple[int, int]] = []  # (first position, policy version)
        self.pages: list[int] = []
        self.shared_pages: list[int] = []  # pages that have had two holders
        self.is_idle = False  # whether its pages count as cached, not as running
        self.cached_tokens = 0  # leading tokens with keys and values in its pages
        self.cache_hit_tokens: int | None = None  # request tokens found in the cache; None before prefill
        self.computed_tokens = 0  # leading tokens computed before; new weights reset the number of idle sequences
        self.page_digests: dict[int, bytes] = {}  # digests of full pages after the cached tokens, by index in `pages`
        self.stale = False  # older weights computed some keys and values: other sequences must not share these
        self.row = -1  # -1 while the sequence is not running
        self.join_id = 0  # number of its latest join of the batch; it changes after a preemption

    def start_request(self, request: GenerationRequest, arrival: int) -> None:
        """Start a request. Cached tokens stay valid up to the first different token or the request's last token."""
        last = len(request.token_ids) - 1
        common_tokens = _count_common_prefix(self.token_ids, request.token_ids)
        self.cached_tokens, self.computed_tokens = (
            min(self.cached_tokens, common_tokens, last),
            min(self.computed_tokens, common_tokens),
        )
        self.request, self.arrival, self.cache_hit_tokens = request, arrival, None
        self.token_ids, self.logprobs, self.versions = request.token_ids, NO_LOGPROBS, []

    def record_cache_hit(self) -> None:
        """Record the cached tokens at a request's first prefill; later prefills, after preemptions, do not count."""
        if self.cache_hit_tokens is None:
            self.cache_hit_tokens = self.cached_tokens

    def record_version(self, position: int, version: int) -> None:
        """Record the version of the tokens from `position` on."""
        self.versions.append((position, version))

    def finish_request(self, finish: Literal["abort"] | None) -> SequenceOutcome:
        """End the pending request; return its Generation, or EngineFailure if logits were not finite."""
        assert self.request is not None
        request, self.request, self.page_digests = self.request, None, {}
        if not np.isfinite(self.logprobs).all():
            return self.sequence_id, EngineFailure(f"sequence {self.sequence_id}: logits are not finite")
        first, end = len(request.token_ids), len(self.token_ids)
        versions = np.empty(end - first, np.int32)
        for since, version in self.versions:
            versions[max(since - first, 0) :] = version
        stopped = end > first and int(self.token_ids[-1]) in request.stop_token_ids
        reason = finish or ("stop" if stopped else "length")
        ids = self.token_ids[first:].copy()
        return self.sequence_id, Generation(ids, self.logprobs, versions, reason, self.cache_hit_tokens or 0)


MissingPages = tuple[Sequence, int]  # a running sequence, and the number of pages that its next token lacks


class PrefillChunk(NamedTuple):
    """The tokens [start, end) of a sequence, which this step prefills."""

    sequence: Sequence
    start: int
    end: int

    def compute_slots(self, page_tokens: int) -> NDArray[np.int64]:
        positions = np.arange(self.start, self.end)
        return np.array(self.sequence.pages)[positions // page_tokens] * page_tokens + positions % page_tokens


def enumerate_chunks(chunks: Iterable[PrefillChunk]) -> Iterator[tuple[int, PrefillChunk]]:
    """Yield each chunk with the number of tokens in the chunks before it."""
    first = 0
    for chunk in chunks:
        yield first, chunk
        first += chunk.end - chunk.start


def _count_common_prefix(ids: NDArray[np.int32], others: NDArray[np.int32]) -> int:
    """Count the leading ids that are equal."""
    count = min(len(ids), len(others))
    differ = ids[:count] != others[:count]
    return int(differ.argmax()) if differ.any() else count
