"""Decides, without tensors, which sequences of the embedded engine prefill, run, wait, and keep cached tokens.

A request waits until its tokens have pages. Then the engine prefills its tokens, first come, first served; a step
prefills at most `prefill_tokens` of all requests. Then the sequence runs in a row of the batch, one token per step.
After its request the sequence is idle: its cached tokens stay until its next request, or until another sequence needs
the pages. If a running sequence needs a page and no page is free, the newest request is preempted: it loses its pages,
and resumes from its tokens when enough pages are free.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asterism.engine.contract import Capacity, EngineFailure, EngineLoad, GenerationRequest, RequestRefused
from asterism.engine.inference.kv.kv_cache_manager import KvCacheManager
from asterism.engine.inference.running_batch import EndedSequence, LaunchedStep, RunningBatch
from asterism.engine.inference.sequence import PrefillChunk, Sequence, SequenceOutcome
from asterism.engine.prefix_tracker import PrefixTracker


class SchedulerActions(NamedTuple):
    clear_pages: Callable[[list[int]], None]  # zeroes pages with keys or values that are not finite
    await_tokens: Callable[[], None]  # makes the tokens of all launched steps known


class Scheduler:
    """The scheduler. A step is `schedule_step`, the model's pass, and `on_tokens_generated`.

    With overlapping steps, the engine calls `batch.launch` after `schedule_step` and `on_tokens_known` later. A
    sequence can then run for one surplus step; that token is discarded. All other calls come between steps; `abort` of
    a running sequence and `on_weights_changed` require that all tokens are known.
    """

    def __init__(
        self,
        capacity: Capacity,
        batch: RunningBatch,
        prefill_tokens: int,
        version: int,
        actions: SchedulerActions,
        prefix_tracker: PrefixTracker | None = None,
    ) -> None:
        """`capacity` has whole pages.

        Engines with a common `prefix_tracker` also count recomputations of tokens that another engine has computed.
        """
        self.batch = batch
        self.version = version
        self._page_tokens = capacity.page_tokens
        self._prefill_tokens = prefill_tokens
        self._actions = actions
        self.kv_manager = KvCacheManager(capacity.kv_tokens // capacity.page_tokens, capacity.page_tokens)
        self._sequences: dict[int, Sequence] = {}  # sequences by sequence_id, until release_cache
        self._prefix_tracker = prefix_tracker or PrefixTracker()
        # Requests of preempted and of idle sequences precede requests of new sequences. The caller bounds both queues.
        self._priority_waiting: deque[Sequence] = deque()
        self._waiting: deque[Sequence] = deque()
        self._prefilling: Sequence | None = None  # has pages, but not all of its tokens are cached
        self._num_arrivals = 0
        self._decode_steps = self._generated_tokens = self.num_preempted = 0
        self._prefilled_tokens = self._recomputed_tokens = 0

    # ------------------------------------------------------------ between steps

    @property
    def has_work(self) -> bool:
        """Return whether a step has sequences to run or prefill. If none runs, the first request has room."""
        return bool(self.batch.sequences or self._prefilling or self._priority_waiting or self._waiting)

    @property
    def is_prefilling(self) -> bool:
        """Return whether a sequence has pages but not all of its tokens are cached."""
        return self._prefilling is not None

    @property
    def num_waiting(self) -> int:
        return len(self._priority_waiting) + len(self._waiting)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request that has passed check_request. Raises RequestRefused if its sequence has another request."""
        sequence = self._sequences.get(request.sequence_id)
        if sequence is not None and sequence.request is not None:
            raise RequestRefused(f"sequence {request.sequence_id} is being generated already")
        if sequence is None:
            prefix = self._prefix_tracker.pop_matching(request.sequence_id, request.token_ids)
            sequence = self._sequences[request.sequence_id] = Sequence(request.sequence_id)
            sequence.token_ids, sequence.computed_tokens = request.token_ids, prefix.num_tokens if prefix else 0
            self._waiting.append(sequence)
        else:
            self._priority_waiting.append(sequence)
        self._num_arrivals += 1
        sequence.start_request(request, self._num_arrivals)
        self.kv_manager.touch(sequence)

    def is_running(self, sequence_id: int) -> bool:
        sequence = self._sequences.get(sequence_id)
        return sequence is not None and sequence.row >= 0

    def abort(self, sequence_id: int) -> list[SequenceOutcome]:
        """End the pending request; return its outcome with the generated tokens, or nothing without a request."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.request is None:
            return []
        if sequence.row >= 0:
            return self._finish([(sequence, self.batch.count_tokens(sequence))], "abort")
        if sequence is self._prefilling:
            self._prefilling = None
            self.kv_manager.mark_idle(sequence)
        else:
            (self._priority_waiting if sequence in self._priority_waiting else self._waiting).remove(sequence)
        return [sequence.finish_request("abort")]

    def release_cache(self, sequence_id: int) -> list[SequenceOutcome]:
        """Abort a pending request and drop the cached tokens of the sequence."""
        outcomes = self.abort(sequence_id)
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self.kv_manager.free(sequence)
            self._prefix_tracker.record(sequence_id, sequence.token_ids[: sequence.computed_tokens])
        return outcomes

    def on_weights_changed(self, version: int) -> None:
        """Give later tokens this version, and drop the cached tokens of idle sequences.

        Running sequences keep their KV cache, which is no longer shared. A sequence in prefill starts again.
        """
        self.version = version
        self.kv_manager.free_idle()
        self._prefix_tracker.clear()
        for sequence, position in zip(self.batch.sequences, self.batch.positions.tolist(), strict=True):
            sequence.record_version(position + 1, version)
            sequence.stale = True
        if self._prefilling is not None:
            sequence, self._prefilling = self._prefilling, None
            self.kv_manager.free(sequence)
            sequence.computed_tokens = 0
            self._priority_waiting.appendleft(sequence)

    def read_generated(self, sequence_id: int, first: int) -> NDArray[np.int32]:
        """Return the pending request's generated tokens from the `first`-th on; none before the sequence runs."""
        sequence = self._sequences[sequence_id]
        if sequence.row < 0 or sequence.request is None:
            return np.zeros(0, np.int32)
        return self.batch.read_tokens(sequence, len(sequence.request.token_ids) + first)

    def get_load(self, busy_s: float) -> EngineLoad:
        page_tokens, pool = self._page_tokens, self.kv_manager.pool
        return EngineLoad(
            running=len(self.batch.sequences) + self.is_prefilling,
            waiting=self.num_waiting,
            used_tokens=pool.num_used * page_tokens,
            cached_tokens=pool.num_cached * page_tokens,
            decode_steps=self._decode_steps,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            recomputed_tokens=self._recomputed_tokens,
            evicted_tokens=self.kv_manager.evicted_pages * page_tokens,
            preempted=self.num_preempted,
            busy_s=busy_s,
        )

    # ------------------------------------------------------------ one step

    def schedule_step(self) -> list[PrefillChunk]:
        """Give the running sequences pages for their next token; return the prompt tokens of this step.

        A sequence joins the batch in the step that prefills its last tokens.
        """
        self.batch.retire_at_limit()
        self._allocate_decode_pages()
        return self._schedule_prefill()

    def on_tokens_generated(self, finished: list[int]) -> list[SequenceOutcome]:
        """Give each running sequence one more token; sequences at the indices `finished` end with this token."""
        step = self.batch.launch()
        self.batch.mark_known(step)
        return self.on_tokens_known(step, finished)

    def on_tokens_known(self, step: LaunchedStep, finished: list[int]) -> list[SequenceOutcome]:
        """Count the step's tokens, without surplus tokens, and end the sequences at its indices `finished`."""
        self._decode_steps += bool(step.sequences)
        self._generated_tokens += len(step.sequences)
        ended = [(step.sequences[index], int(step.positions[index]) + 1) for index in finished]
        return self._finish(ended, None) if ended else []

    # ------------------------------------------------------------ many steps at once

    def count_steps_ahead(self) -> int:
        """Return the number of steps, at least 1, until a sequence reaches its last token or lacks pages."""
        longest = self.batch.count_steps_to_limit()
        available, count_missing = self.kv_manager.num_available, self.batch.count_missing_pages
        if count_missing(longest) <= available:
            return longest
        return bisect_right(range(longest), available, lo=2, key=count_missing) - 1

    def skip_steps(self, steps: int) -> None:
        """Skip at most `count_steps_ahead` - 1 steps, which have no prompt tokens and end no sequence."""
        if steps:
            self.batch.advance(steps)
            self._decode_steps += steps
            self._generated_tokens += steps * len(self.batch.sequences)
            self._allocate_decode_pages()

    def _finish(self, ended: list[EndedSequence], reason: Literal["abort"] | None) -> list[SequenceOutcome]:
        """Take these sequences out of the batch and keep their cached tokens."""
        self.batch.drop_ended(ended)
        outcomes: list[SequenceOutcome] = []
        for sequence, _ in ended:
            outcomes.append(sequence.finish_request(reason))
            if isinstance(outcomes[-1][1], EngineFailure):
                self._actions.clear_pages(self.kv_manager.free(sequence))
            else:
                self.kv_manager.mark_idle(sequence)
        return outcomes

    # ------------------------------------------------------------ pages and prefill

    def _allocate_decode_pages(self) -> None:
        while not self.kv_manager.append_pages(missing := self.batch.list_missing_pages()):
            if self.batch.num_unknown:
                self._actions.await_tokens()  # ended sequences free their pages
            else:
                self._preempt()
        self.batch.on_pages_appended(missing)

    def _preempt(self) -> None:
        """Free the pages of the newest request, and put it at the head of the queue."""
        candidates = [*self.batch.sequences, *([self._prefilling] if self._prefilling else [])]
        newest = max(candidates, key=lambda sequence: sequence.arrival)
        if newest is self._prefilling:
            self._prefilling = None
        else:
            self.batch.drop_ended([(newest, self.batch.count_tokens(newest))])
        self.kv_manager.free(newest)
        self._priority_waiting.appendleft(newest)
        self.num_preempted += 1

    def _schedule_prefill(self) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        joining: list[Sequence] = []
        tokens_left = self._prefill_tokens
        while tokens_left > 0 and (sequence := self._select_prefill(len(joining))) is not None:
            start, last = sequence.cached_tokens, len(sequence.token_ids) - 1
            end = min(last, start + tokens_left)
            if start < end:
                chunks.append(PrefillChunk(sequence, start, end))
                self.kv_manager.record_prefill(chunks[-1])
                self._count_prefilled(sequence, start, end)
            tokens_left -= end - start
            if end == last:
                self._prefilling = None
                self._count_prefilled(sequence, last, last + 1)
                joining.append(sequence)
        if joining:
            self.batch.join(joining, self.version)
        return chunks

    def _select_prefill(self, num_joining: int) -> Sequence | None:
        """Return the sequence in prefill, or the first waiting sequence if there are a row and pages for it."""
        if self._prefilling is None and self.batch.num_free_rows > num_joining:
            queue = self._priority_waiting or self._waiting
            if queue and self.kv_manager.allocate(queue[0]):
                self._prefilling = queue.popleft()
                self._prefilling.record_cache_hit()
        return self._prefilling

    def _count_prefilled(self, sequence: Sequence, start: int, end: int) -> None:
        """Count the tokens [start, end) of the sequence, which this step computes."""
        self._prefilled_tokens += end - start
        self._recomputed_tokens += max(min(end, sequence.computed_tokens) - start, 0)
        sequence.computed_tokens = max(sequence.computed_tokens, end)
