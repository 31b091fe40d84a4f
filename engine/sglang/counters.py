"""What the engine can tell of its load: from the server's snapshots, and from what comes with every answer.

running, waiting, used      the server's newest snapshot (/v1/loads), up to some steps old; none in flight: nothing runs
cached                      what sequences are known to have had there, as far as there is room beside the used
decode_steps                the server's own count, of its busiest rank; it leaves out steps next to a prefill
generated, prefilled        completion_tokens, and prompt_tokens less cached_tokens, of the answers
evicted, recomputed         of what a sequence had had, what cached_tokens does not have; all of it after a retraction
preempted                   num_retractions of the answers
busy_s                      time with a request in flight
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import structlog
from msgspec import UNSET
from numpy.typing import NDArray

from engine.contract import Capacity, EngineLoad, GenerationRequest
from engine.sglang.outcomes import Part
from engine.sglang.prefixes import Prefixes
from engine.sglang.protocol import MetaInfo, RankLoad


class Counters:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logger = structlog.get_logger()
        self._prefixes = Prefixes()
        self._in_flight = 0
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._snapshot: Sequence[RankLoad] = ()
        self._first_steps: dict[int, int] = {}  # by rank, what it had counted when it was first asked
        self._generated = self._prefilled = self._recomputed = self._evicted = self._preempted = 0
        self.capacity = Capacity(0, 1, 0)

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def begin(self) -> None:
        if not self._in_flight:
            self._busy_since = self._clock()
        self._in_flight += 1

    def end(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._busy_s += self._clock() - self._busy_since

    def take(self, request: GenerationRequest, prompt: NDArray[np.int32], before: MetaInfo | None, part: Part) -> None:
        """An answer has come, `part.meta`, and `before` it another one to the same prompt."""
        meta = part.meta
        if meta is None or meta.prompt_tokens is UNSET or meta.cached_tokens is UNSET or meta.num_retractions is UNSET:
            return
        if before is None:
            self._prefilled += meta.prompt_tokens - meta.cached_tokens
            self._note_lost(request.sequence_id, prompt, meta.cached_tokens)
        self._generated += meta.completion_tokens - (before.completion_tokens if before else 0)
        known = before.num_retractions if before and before.num_retractions is not UNSET else 0
        if meta.num_retractions > known:
            self._note_retracted(request.sequence_id, meta.num_retractions - known, len(prompt) + len(part.token_ids))

    def keep(self, request: GenerationRequest, prompt: NDArray[np.int32], part: Part) -> None:
        """It has ended: all but its last token have been computed."""
        if part.token_ids:
            token_ids = np.concatenate((prompt, np.array(part.token_ids[:-1], np.int32)))
            self._prefixes.keep(request.sequence_id, token_ids)

    def forget(self, sequence_id: int) -> None:
        self._prefixes.forget(sequence_id)

    def weights_changed(self) -> None:
        self._prefixes.clear()

    def see(self, snapshot: Sequence[RankLoad]) -> None:
        self._snapshot = snapshot
        for rank in snapshot:
            self._first_steps.setdefault(rank.dp_rank, _steps(rank))

    def load(self, held: int) -> EngineLoad:
        """`held`: requests that wait on this side."""
        busy = self._in_flight > held
        running_tokens = sum(rank.num_used_tokens for rank in self._snapshot) if busy else 0
        cached = min(self._prefixes.tokens, max(0, self.capacity.kv_tokens - running_tokens))
        under_way = self._clock() - self._busy_since if self._in_flight else 0.0
        return EngineLoad(
            running=sum(rank.num_running_reqs for rank in self._snapshot) if busy else 0,
            waiting=held + (sum(rank.num_waiting_reqs for rank in self._snapshot) if busy else 0),
            used_tokens=running_tokens + cached,
            cached_tokens=cached,
            decode_steps=max((_steps(rank) - self._first_steps[rank.dp_rank] for rank in self._snapshot), default=0),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            recomputed_tokens=self._recomputed,
            evicted_tokens=self._evicted,
            preempted=self._preempted,
            busy_s=self._busy_s + under_way,
        )

    def _note_lost(self, sequence_id: int, prompt: NDArray[np.int32], cached_tokens: int) -> None:
        prefix = self._prefixes.recall(sequence_id, prompt)
        if prefix is None:
            return
        page = self.capacity.page_tokens
        had = min(prefix.tokens, len(prompt) - 1) // page * page  # the last token is computed in any case
        lost = had - cached_tokens
        if lost > 0:
            self._recomputed += lost
            if prefix.wanted:
                self._evicted += lost
                self._logger.warning(
                    "engine.evicted", trajectory_id=sequence_id, had_tokens=had, cached_tokens=cached_tokens
                )

    def _note_retracted(self, sequence_id: int, times: int, tokens: int) -> None:
        self._preempted += times
        self._prefilled += times * tokens
        self._recomputed += times * tokens
        self._logger.warning("engine.retracted", trajectory_id=sequence_id, times=times, tokens=tokens)


def _steps(rank: RankLoad) -> int:
    return int(rank.decode_moments[0]) if rank.decode_moments else 0
