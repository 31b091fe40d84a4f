"""The engine's load, from the server's snapshots and from the metadata of its responses.

running, waiting, used   from the server's newest snapshot (/v1/loads), a few steps old; 0 if no request is in flight
cached                   prefixes that the server should still cache, up to the capacity that running requests leave
decode_steps             the server's own count, of its busiest rank; excludes steps with a prefill
generated, prefilled     completion_tokens, and prompt_tokens - cached_tokens, of the responses
evicted, recomputed      tokens of a sequence's prefix that cached_tokens lacks; after a retraction, all of its tokens
preempted                num_retractions of the responses
busy_s                   time with a request in flight
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import structlog
from msgspec import UNSET
from numpy.typing import NDArray

from asterism.engine.contract import Capacity, EngineFailure, EngineLoad, GenerationRequest
from asterism.engine.prefix_tracker import PrefixTracker
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import MetaInfo, RankLoad
from asterism.engine.sglang.responses import RequestOutput

POLL_INTERVAL_S = 0.5  # each poll costs engine and server about 2 ms of work


class LoadCounters:
    def __init__(self) -> None:
        self._logger = structlog.get_logger()
        self.prefixes = PrefixTracker()
        self.num_in_flight = 0
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._rank_loads: Sequence[RankLoad] = ()
        self._initial_steps: dict[int, int] = {}  # decode steps in the first snapshot of each rank
        self._generated = self._prefilled = self._recomputed = self._evicted = self._preempted = 0
        self.capacity = Capacity(0, 1, 0)

    def start_request(self) -> None:
        if not self.num_in_flight:
            self._busy_since = time.monotonic()
        self.num_in_flight += 1

    def end_request(self) -> None:
        self.num_in_flight -= 1
        if not self.num_in_flight:
            self._busy_s += time.monotonic() - self._busy_since

    def record_response(
        self, request: GenerationRequest, prompt: NDArray[np.int32], previous: MetaInfo | None, output: RequestOutput
    ) -> None:
        """Count the newest response of `output`; `previous` is the metadata of the response before it."""
        meta = output.meta
        if meta is None or meta.prompt_tokens is UNSET or meta.cached_tokens is UNSET or meta.num_retractions is UNSET:
            return
        if previous is None:
            self._prefilled += meta.prompt_tokens - meta.cached_tokens
            self._record_cache_miss(request.sequence_id, prompt, meta.cached_tokens)
        self._generated += meta.completion_tokens - (previous.completion_tokens if previous else 0)
        known = previous.num_retractions if previous and previous.num_retractions is not UNSET else 0
        if meta.num_retractions > known:
            self._record_retractions(
                request.sequence_id, meta.num_retractions - known, len(prompt) + len(output.token_ids)
            )

    def record_computed(self, request: GenerationRequest, prompt: NDArray[np.int32], output: RequestOutput) -> None:
        """Record the prefix of an ended request: the cache holds all its tokens except the last one."""
        if output.token_ids:
            token_ids = np.concatenate((prompt, np.array(output.token_ids[:-1], np.int32)))
            self.prefixes.record(request.sequence_id, token_ids)

    def record_rank_loads(self, rank_loads: Sequence[RankLoad]) -> None:
        self._rank_loads = rank_loads
        for rank in rank_loads:
            self._initial_steps.setdefault(rank.dp_rank, _get_decode_steps(rank))

    def get_load(self, num_waiting_to_send: int) -> EngineLoad:
        """Return the engine's load. `num_waiting_to_send`: requests that the engine has not sent yet."""
        busy = self.num_in_flight > num_waiting_to_send
        running_tokens = sum(rank.num_used_tokens for rank in self._rank_loads) if busy else 0
        cached = min(self.prefixes.num_tokens, max(0, self.capacity.kv_tokens - running_tokens))
        current_busy_s = time.monotonic() - self._busy_since if self.num_in_flight else 0.0
        return EngineLoad(
            running=sum(rank.num_running_reqs for rank in self._rank_loads) if busy else 0,
            waiting=num_waiting_to_send + (sum(rank.num_waiting_reqs for rank in self._rank_loads) if busy else 0),
            used_tokens=running_tokens + cached,
            cached_tokens=cached,
            decode_steps=max(
                (_get_decode_steps(rank) - self._initial_steps[rank.dp_rank] for rank in self._rank_loads), default=0
            ),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            recomputed_tokens=self._recomputed,
            evicted_tokens=self._evicted,
            preempted=self._preempted,
            busy_s=self._busy_s + current_busy_s,
        )

    def _record_cache_miss(self, sequence_id: int, prompt: NDArray[np.int32], cached_tokens: int) -> None:
        prefix = self.prefixes.pop_matching(sequence_id, prompt)
        if prefix is None:
            return
        page = self.capacity.page_tokens
        # The cache holds whole pages only, and the last token is always computed.
        had_tokens = min(prefix.num_tokens, len(prompt) - 1) // page * page
        lost = had_tokens - cached_tokens
        if lost > 0:
            self._recomputed += lost
            if prefix.is_active:
                self._evicted += lost
                self._logger.warning(
                    "engine.evicted", trajectory_id=sequence_id, had_tokens=had_tokens, cached_tokens=cached_tokens
                )

    def _record_retractions(self, sequence_id: int, times: int, tokens: int) -> None:
        self._preempted += times
        self._prefilled += times * tokens
        self._recomputed += times * tokens
        self._logger.warning("engine.retracted", trajectory_id=sequence_id, times=times, tokens=tokens)


class LoadPoller:
    def __init__(self, counters: LoadCounters, interval_s: float = POLL_INTERVAL_S) -> None:
        self._counters = counters
        self._interval_s = interval_s
        self._needed = asyncio.Event()
        self._logger = structlog.get_logger()

    def wake(self) -> None:
        """Start polling, because a request is in flight."""
        self._needed.set()

    async def run(self, client: SGLangClient) -> None:
        """Poll until the task is cancelled. Only the first of several failures in a row is logged."""
        reachable = True
        while True:
            await self._needed.wait()
            if not self._counters.num_in_flight:
                self._needed.clear()  # stops polling after one final poll
            try:
                self._counters.record_rank_loads(await client.get_loads())
                reachable = True
            except EngineFailure as failure:
                if reachable:
                    self._logger.warning("engine.load_poll_failed", cause=str(failure))
                reachable = False
            await asyncio.sleep(self._interval_s)


def _get_decode_steps(rank: RankLoad) -> int:
    return int(rank.decode_moments[0]) if rank.decode_moments else 0
