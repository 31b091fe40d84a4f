"""One simulated engine: continuous batching over a paged KV cache, in virtual time.

The scheduler is vLLM's default. (SGLang's admits a request only if the expected growth of the
running sequences leaves room for it, so it preempts less and queues more.) A step decodes one token
of every running sequence and prefills one chunk of the admitted sequences. Requests are admitted in
order of arrival while pages for their present tokens are available. The cache of a trajectory is kept
between its turns. When pages run out, the engine evicts the least recently used caches, from their
ends; then it preempts the sequence that was admitted last, which is recomputed later. The siblings of
a group share the full pages of their prompt.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from analysis.simulation.cluster_model import SimulatedCluster
from analysis.simulation.simulated_cache import DecodeBatch, SimulatedKvCache, SimulatedSequence
from analysis.simulation.synthetic_tokens import build_generated_turn
from analysis.simulation.timeline import VirtualTimeline
from analysis.simulation.workload import TrajectoryPlan
from bus.messages import EngineLoadReported, ProtocolError, TurnGenerated, TurnRequested

REPORT_INTERVAL_S = 0.25


class EngineEnvironment(Protocol):
    """The interface between an engine and its simulation."""

    timeline: VirtualTimeline
    plans: Mapping[int, TrajectoryPlan]
    computed_tokens: dict[int, int]  # tokens of each trajectory that some engine has computed

    def deliver_turn(self, turn: TurnGenerated) -> None: ...

    def report_load(self, report: EngineLoadReported) -> None: ...


class SimulatedEngine:
    """Attributes are counters since the start; `running_s` and `used_page_s` are integrals over time."""

    def __init__(self, name: str, cluster: SimulatedCluster, environment: EngineEnvironment) -> None:
        self.name = name
        self.kv_cache = SimulatedKvCache(cluster.kv_tokens // cluster.page_tokens, cluster.page_tokens)
        self.waiting: deque[SimulatedSequence] = deque()
        self.running = DecodeBatch(cluster.page_tokens, cluster.cost)
        self.prefilling: OrderedDict[int, SimulatedSequence] = OrderedDict()
        self.decode_steps = self.generated_tokens = self.prefilled_tokens = self.recomputed_tokens = 0
        self.preempted = self.overflows = 0
        self.busy_s = self.running_s = self.used_page_s = self.queued_s = self.prefilling_s = 0.0
        self.peak_pages = 0
        self._cluster = cluster
        self._cost = cluster.cost
        self._environment = environment
        self._timeline = environment.timeline
        self._sequences: dict[int, SimulatedSequence] = {}
        self._advanced_until = 0.0  # end of the last completed step, or of the last idle interval
        self._wakeup_id = 0  # of the latest wake-up; earlier ones are void
        self._wakeup_step = 0  # the wake-up is at the end of this step
        self._chunk_s = 0.0  # duration of the current step, if it prefills; else 0
        self._is_reporting = False

    def submit(self, request: TurnRequested) -> None:
        self._advance_to_now()
        plan = self._environment.plans[request.trajectory_id]
        sequence = self._sequences.get(request.trajectory_id)
        if sequence is None:
            page = self.kv_cache.page_tokens
            sequence = SimulatedSequence(request.trajectory_id, plan.group_id, plan.prompt_tokens, page)
            self._sequences[request.trajectory_id] = sequence
        end = plan.ends[request.turn]
        sequence.lease, sequence.turn = request.lease, request.turn
        sequence.tokens = sequence.request_tokens = len(request.token_ids) // 4
        sequence.target_tokens = min(end, sequence.tokens + request.max_new_tokens)
        sequence.reaches_stop = sequence.target_tokens == end
        sequence.phase_started_s = self._timeline.now
        self.waiting.append(sequence)
        if not self._is_reporting:
            self._is_reporting = True
            self._timeline.call_at(self._timeline.now + REPORT_INTERVAL_S, self._report_load, 0)
        if not (self.running or self.prefilling):
            self._start_step()
        else:
            self._schedule_admission()

    def release_cache(self, trajectory_id: int, lease: int | None = None) -> None:
        """Free the cache of a trajectory, unless a request under a later lease has arrived."""
        sequence = self._sequences.get(trajectory_id)
        if sequence is None or (lease is not None and sequence.lease > lease):
            return
        self._advance_to_now()
        if trajectory_id in self.running or trajectory_id in self.prefilling or sequence in self.waiting:
            raise ProtocolError(
                f"{self.name} cannot release the cache of trajectory {trajectory_id} while it generates"
            )
        self.kv_cache.free(sequence)
        del self._sequences[trajectory_id]
        if self.waiting:
            self._schedule_admission()

    def update_counters(self) -> None:
        """Advance the counters and integrals to the current time."""
        self._advance_to_now()
        if not self._chunk_s and not self.running:
            self._integrate(self._timeline.now - self._advanced_until, 0)

    def _advance_to_now(self) -> None:
        if self._chunk_s or not self.running:
            return
        elapsed = self._timeline.now - self._advanced_until
        steps = min(
            self._cost.count_steps_within(len(self.running), self.running.kv_tokens, elapsed),
            self._wakeup_step - self.running.completed_steps,
        )
        if steps:
            self._complete_steps(steps, self.running.compute_steps_s(steps))

    def _complete_steps(self, steps: int, seconds: float) -> None:
        self.busy_s += seconds
        self._integrate(seconds, self.running.count_new_pages(steps))
        self.decode_steps += steps
        self.generated_tokens += len(self.running) * steps
        self.running.complete_steps(steps)
        self._reclaim_pages(0)

    def _integrate(self, seconds: float, new_pages: int) -> None:
        self.running_s += len(self.running) * seconds
        self.used_page_s += (self.kv_cache.used_pages + new_pages / 2) * seconds
        self.kv_cache.used_pages += new_pages
        self._advanced_until += seconds

    def _schedule_wakeup(self, step: int) -> None:
        """At the end of this step."""
        seconds = self.running.compute_steps_s(step - self.running.completed_steps)
        self._wakeup_id += 1
        self._wakeup_step = step
        self._timeline.call_at(self._advanced_until + seconds, self._on_wakeup, self._wakeup_id)

    def _schedule_admission(self) -> None:
        """Wake up at the end of the current step, to admit waiting requests."""
        if not self._chunk_s and self._wakeup_step > self.running.completed_steps + 1:
            self._schedule_wakeup(self.running.completed_steps + 1)

    def _on_wakeup(self, wakeup_id: int) -> None:
        if wakeup_id != self._wakeup_id:
            return
        steps = self._wakeup_step - self.running.completed_steps
        if steps:
            self._complete_steps(steps, self._timeline.now - self._advanced_until)
        if self._chunk_s:
            self._chunk_s = 0.0
            self._finish_chunk()
        self._finish_turns()
        self._start_step()

    def _finish_turns(self) -> None:
        while (sequence := self.running.find_finished()) is not None:
            self._leave_batch(sequence)
            self._deliver_turn(sequence)

    def _deliver_turn(self, sequence: SimulatedSequence) -> None:
        self.kv_cache.mark_idle(sequence)
        turn = build_generated_turn(
            sequence,
            stops=sequence.reaches_stop,
            last=sequence.turn + 1 == len(self._environment.plans[sequence.trajectory_id].turns),
        )
        self._environment.deliver_turn(turn)

    def _leave_batch(self, sequence: SimulatedSequence) -> None:
        self.running.remove(sequence)
        sequence.own_pages = self.kv_cache.count_own_pages(sequence, sequence.tokens)
        self._record_computed(sequence)

    def _record_computed(self, sequence: SimulatedSequence) -> None:
        """All tokens except the last one, which is sampled but not yet computed."""
        sequence.cached_tokens = sequence.tokens - 1
        computed_tokens = self._environment.computed_tokens
        computed_tokens[sequence.trajectory_id] = max(
            computed_tokens.get(sequence.trajectory_id, 0), sequence.cached_tokens
        )

    def _join_batch(self, sequence: SimulatedSequence) -> None:
        """After the prefill: the first token of the turn is sampled."""
        self.prefilling_s += self._timeline.now - sequence.phase_started_s
        sequence.tokens += 1
        self.generated_tokens += 1
        self._record_computed(sequence)
        if sequence.tokens >= sequence.target_tokens:
            self._deliver_turn(sequence)
            return
        self.running.add(sequence)

    def _start_step(self) -> None:
        if not (self.running or self.prefilling):
            self._integrate(self._timeline.now - self._advanced_until, 0)  # idle
        preempted = self.preempted
        self._reclaim_pages(self.running.count_new_pages(1))
        if preempted == self.preempted:
            self._admit()
        self.peak_pages = max(self.peak_pages, self.kv_cache.used_pages)
        if self.prefilling:
            self._start_chunk()
        elif self.running:
            available = self.kv_cache.num_pages - self.kv_cache.used_pages + self.kv_cache.reclaimable_pages
            self._schedule_wakeup(self.running.completed_steps + self.running.count_steps_ahead(available))
        else:
            self._wakeup_id += 1

    def _admit(self) -> None:
        slots = self._cluster.max_running - len(self.running) - len(self.prefilling)
        while self.waiting and slots > 0:
            sequence = self.waiting[0]
            missing = self.kv_cache.count_missing_pages(sequence, sequence.tokens + 1) + self.running.count_new_pages(1)
            is_idle = not (self.running or self.prefilling)
            if missing > self.kv_cache.count_available_pages(sequence) and not is_idle:
                return
            self.waiting.popleft()
            slots -= 1
            self._start_prefill(sequence)

    def _start_prefill(self, sequence: SimulatedSequence) -> None:
        cached = self.kv_cache.count_cached_prefix(sequence)
        computed = self._environment.computed_tokens.get(sequence.trajectory_id, 0)
        self.recomputed_tokens += max(0, min(computed, sequence.tokens) - cached)
        sequence.cached_tokens = cached
        sequence.remaining_prefill = sequence.tokens - cached
        evictions = self.kv_cache.evictions
        self.kv_cache.allocate(sequence, sequence.tokens + 1)
        self.overflows += self.kv_cache.evictions > evictions
        self.queued_s += self._timeline.now - sequence.phase_started_s
        sequence.phase_started_s = self._timeline.now
        self.prefilling[sequence.trajectory_id] = sequence

    def _reclaim_pages(self, extra: int) -> None:
        """Make room for `extra` pages: evict idle caches, then preempt in reverse order of admission."""
        pages = self.kv_cache
        if pages.used_pages + extra <= pages.num_pages:
            return
        self.overflows += 1
        pages.evict(extra)
        while pages.used_pages + extra > pages.num_pages:
            self._preempt()
            extra = self.running.count_new_pages(1) if extra else 0

    def _preempt(self) -> None:
        if self.prefilling:
            _, sequence = self.prefilling.popitem()
        else:
            sequence = self.running.get_last()
            self._leave_batch(sequence)
        self.kv_cache.free(sequence)
        sequence.cached_tokens = 0
        sequence.phase_started_s = self._timeline.now
        self.waiting.appendleft(sequence)
        self.preempted += 1

    def _start_chunk(self) -> None:
        """Start a step that also prefills, in order of admission."""
        chunk = _fill_chunk(self.prefilling.values(), self._cluster.chunk_tokens)
        self.prefilled_tokens += chunk.tokens
        self._chunk_s = self._cost.compute_step_s(
            len(self.running) + chunk.sequences,
            self.running.kv_tokens + chunk.read_tokens,
            chunk.tokens - chunk.sequences,
            chunk.pairs,
        )
        self._wakeup_id += 1
        self._wakeup_step = self.running.completed_steps + 1
        self._timeline.call_at(self._timeline.now + self._chunk_s, self._on_wakeup, self._wakeup_id)

    def _finish_chunk(self) -> None:
        while self.prefilling:
            sequence = next(iter(self.prefilling.values()))
            if sequence.remaining_prefill:
                return
            del self.prefilling[sequence.trajectory_id]
            self._join_batch(sequence)

    def _report_load(self, _: int) -> None:
        self.update_counters()
        self._environment.report_load(_build_load_report(self))
        self._is_reporting = bool(self.running or self.prefilling or self.waiting)
        if self._is_reporting:
            self._timeline.call_at(self._timeline.now + REPORT_INTERVAL_S, self._report_load, 0)


class _PrefillChunk(NamedTuple):
    """The prefill of one step. The last token of each sequence is charged as a decoded token."""

    tokens: int
    sequences: int
    read_tokens: int  # read from the cache by the last tokens
    pairs: float  # query-key pairs of the other tokens


def _fill_chunk(prefilling: Iterable[SimulatedSequence], chunk_tokens: int) -> _PrefillChunk:
    """Take up to `chunk_tokens` from the remaining prefill of the sequences, in order."""
    tokens_left, pairs, sequences, read_tokens = chunk_tokens, 0.0, 0, 0
    for sequence in prefilling:
        tokens = min(tokens_left, sequence.remaining_prefill)
        before = sequence.tokens - sequence.remaining_prefill
        pairs += (tokens - 1) * (before + tokens / 2)
        sequences += 1
        read_tokens += before + tokens
        sequence.remaining_prefill -= tokens
        tokens_left -= tokens
        if not tokens_left:
            break
    return _PrefillChunk(chunk_tokens - tokens_left, sequences, read_tokens, pairs)


def _build_load_report(engine: SimulatedEngine) -> EngineLoadReported:
    page = engine.kv_cache.page_tokens
    return EngineLoadReported(
        engine=engine.name,
        version=0,
        running=len(engine.running),
        waiting=len(engine.waiting),
        used_tokens=engine.kv_cache.used_pages * page,
        cached_tokens=engine.kv_cache.reclaimable_pages * page,
        decode_steps=engine.decode_steps,
        generated_tokens=engine.generated_tokens,
        prefilled_tokens=engine.prefilled_tokens,
        recomputed_tokens=engine.recomputed_tokens,
        evicted_tokens=engine.kv_cache.evicted_tokens,
        preempted=engine.preempted,
        busy_s=engine.busy_s,
    )
