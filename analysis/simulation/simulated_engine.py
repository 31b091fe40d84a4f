"""One simulated engine: the embedded engine's scheduler in virtual time, with modelled step costs instead of a model.

Steps between two changes of the batch are not simulated one by one: their duration has a closed form, and the
scheduler skips them together.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from asterism.analysis.simulation.cluster_model import SimulatedCluster
from asterism.analysis.simulation.synthetic_tokens import build_generated_turn, build_trajectory_ids
from asterism.analysis.simulation.timeline import VirtualTimeline
from asterism.analysis.simulation.workload import TrajectoryPlan
from asterism.bus.messages import EngineLoadReported, ProtocolError, TurnGenerated, TurnRequested
from asterism.engine.contract import Capacity, EngineLoad, GenerationRequest
from asterism.engine.inference.running_batch import RunningBatch
from asterism.engine.inference.scheduler import Scheduler, SchedulerActions
from asterism.engine.inference.sequence import PrefillChunk, SequenceOutcome
from asterism.engine.inference.sequence import Sequence as GeneratedSequence
from asterism.engine.prefix_tracker import PrefixTracker

REPORT_INTERVAL_S = 0.25


class EngineEnvironment(Protocol):
    """The interface between an engine and its simulation."""

    timeline: VirtualTimeline
    plans: Mapping[int, TrajectoryPlan]
    prefix_tracker: PrefixTracker  # tracker of all engines

    def deliver_turn(self, turn: TurnGenerated) -> None: ...

    def report_load(self, report: EngineLoadReported) -> None: ...


class SimulatedEngine:
    """An engine in virtual time. `running_s`, `used_page_s`, `queued_s` and `prefilling_s` are integrals over time."""

    def __init__(self, name: str, cluster: SimulatedCluster, environment: EngineEnvironment) -> None:
        self.name = name
        self.num_pages = cluster.kv_tokens // cluster.page_tokens
        self.overflows = 0  # times that pages ran out
        self.peak_pages = 0
        self.busy_s = self.running_s = self.used_page_s = self.queued_s = self.prefilling_s = 0.0
        self._cost, self._environment, self._timeline = cluster.cost, environment, environment.timeline
        self._batch = RunningBatch(_SimulatedRows(), cluster.max_running, cluster.page_tokens)
        capacity = Capacity(self.num_pages * cluster.page_tokens, cluster.page_tokens, cluster.kv_tokens)
        actions = SchedulerActions(clear_pages=_do_nothing, await_tokens=_do_nothing)
        self._scheduler = Scheduler(capacity, self._batch, cluster.chunk_tokens, 0, actions, environment.prefix_tracker)
        self._kv_manager = self._scheduler.kv_manager
        self._requests: dict[int, TurnRequested] = {}  # latest request of each trajectory, until its cache is released
        self._generating: set[int] = set()  # trajectories that generate
        self._advanced_until = 0.0  # end of the last completed step, or of the last idle interval
        self._wakeup_id = 0  # id of the latest wake-up; earlier wake-ups are void
        self._steps_left = 0  # steps until the wake-up
        self._kv_tokens = 0  # KV tokens that the next step reads
        self._prefill_step_s = 0.0  # duration of the current step, if it prefills; else 0
        self._num_prefilling = self._num_waiting = 0  # sequences in the current step
        self._is_reporting = False

    @property
    def used_pages(self) -> int:
        return self._kv_manager.pool.num_used

    @property
    def evicted_caches(self) -> int:
        return self._kv_manager.evicted_caches

    def get_load(self) -> EngineLoad:
        return self._scheduler.get_load(self.busy_s)

    def submit(self, request: TurnRequested) -> None:
        self.update_counters()
        trajectory_id, now = request.trajectory_id, self._timeline.now
        token_ids = np.frombuffer(request.token_ids, np.int32)
        planned_tokens = self._environment.plans[trajectory_id].ends[request.turn] - len(token_ids)
        new_tokens = min(planned_tokens, request.max_new_tokens)
        self._requests[trajectory_id] = request
        self._generating.add(trajectory_id)
        self._scheduler.submit(GenerationRequest(trajectory_id, token_ids, new_tokens))
        if not self._is_reporting:
            self._is_reporting = True
            self._timeline.call_at(now + REPORT_INTERVAL_S, self._report_load, None)
        if self._steps_left:
            self._num_waiting += 1
            self.queued_s -= now - self._advanced_until  # the current step began before the arrival
            self._schedule_admission()
        else:
            self._integrate(now - self._advanced_until)
            self._start_step()

    def release_cache(self, trajectory_id: int, lease: int | None = None) -> None:
        """Free the cache of a trajectory, unless a request under a later lease has arrived."""
        request = self._requests.get(trajectory_id)
        if request is None or (lease is not None and request.lease > lease):
            return
        if trajectory_id in self._generating:
            raise ProtocolError(
                f"{self.name} cannot release the cache of trajectory {trajectory_id} while it generates"
            )
        self.update_counters()
        self._scheduler.release_cache(trajectory_id)
        del self._requests[trajectory_id]
        if self._num_waiting:
            self._schedule_admission()

    def update_counters(self) -> None:
        """Advance the counters and integrals to the end of the last step before the current time."""
        if self._prefill_step_s or self._steps_left < 2:
            return
        elapsed = self._timeline.now - self._advanced_until
        steps = self._cost.count_steps_within(len(self._batch.sequences), self._kv_tokens, elapsed)
        self._skip_steps(min(steps, self._steps_left - 1))

    def _skip_steps(self, steps: int) -> None:
        if steps:
            seconds = self._compute_steps_s(steps)
            used_pages, evicted_pages = self.used_pages, self._kv_manager.evicted_pages
            self._scheduler.skip_steps(steps)
            self.overflows += self._kv_manager.evicted_pages > evicted_pages
            self.used_page_s -= (self.used_pages - used_pages) / 2 * seconds  # the used pages grow during these steps
            self._complete_steps(steps, seconds)

    def _complete_steps(self, steps: int, seconds: float) -> None:
        self.busy_s += seconds
        self._integrate(seconds)
        self._steps_left -= steps
        self._kv_tokens += steps * len(self._batch.sequences)

    def _integrate(self, seconds: float) -> None:
        self.running_s += len(self._batch.sequences) * seconds
        self.used_page_s += self.used_pages * seconds
        self.queued_s += self._num_waiting * seconds
        self.prefilling_s += self._num_prefilling * seconds
        self._advanced_until += seconds

    def _compute_steps_s(self, steps: int) -> float:
        return self._cost.compute_steps_s(len(self._batch.sequences), self._kv_tokens, steps)

    def _schedule_admission(self) -> None:
        """Wake up at the end of the current step, to admit waiting requests."""
        if self._steps_left > 1:
            self._schedule_wakeup(1, self._compute_steps_s(1))

    def _schedule_wakeup(self, steps: int, seconds: float) -> None:
        self._wakeup_id += 1
        self._steps_left = steps
        self._timeline.call_at(self._advanced_until + seconds, self._on_wakeup, self._wakeup_id)

    def _on_wakeup(self, wakeup_id: int) -> None:
        if wakeup_id != self._wakeup_id:
            return
        self._skip_steps(self._steps_left - 1)
        self._complete_steps(1, self._timeline.now - self._advanced_until)
        self._deliver_turns(self._scheduler.on_tokens_generated(self._batch.list_at_limit()))
        self._start_step()

    def _deliver_turns(self, outcomes: list[SequenceOutcome]) -> None:
        for trajectory_id, _ in outcomes:
            self._generating.remove(trajectory_id)
            plan, request = self._environment.plans[trajectory_id], self._requests[trajectory_id]
            self._environment.deliver_turn(build_generated_turn(request, plan))

    def _start_step(self) -> None:
        """Start the next step; without work, the next request starts it."""
        num_joins, before = self._batch.num_joins, (self._kv_manager.evicted_pages, self._scheduler.num_preempted)
        chunks = self._scheduler.schedule_step()
        self.overflows += before != (self._kv_manager.evicted_pages, self._scheduler.num_preempted)
        self.peak_pages = max(self.peak_pages, self.used_pages)
        joined = self._batch.num_joins - num_joins
        self._num_waiting, self._num_prefilling = self._scheduler.num_waiting, self._scheduler.is_prefilling + joined
        self._kv_tokens = int(self._batch.positions.sum()) + len(self._batch.sequences)
        self._prefill_step_s = 0.0
        if chunks or joined:
            prefill, pairs = sum([chunk.end - chunk.start for chunk in chunks]), _count_pairs(chunks)
            running = len(self._batch.sequences)
            self._prefill_step_s = self._cost.compute_step_s(running, self._kv_tokens, prefill, pairs)
            self._schedule_wakeup(1, self._prefill_step_s)
        elif self._batch.sequences:
            steps = self._scheduler.count_steps_ahead()
            self._schedule_wakeup(steps, self._compute_steps_s(steps))

    def _report_load(self, _: None) -> None:
        self.update_counters()
        self._environment.report_load(EngineLoadReported(engine=self.name, version=0, **asdict(self.get_load())))
        self._is_reporting = self._scheduler.has_work
        if self._is_reporting:
            self._timeline.call_at(self._timeline.now + REPORT_INTERVAL_S, self._report_load, None)


def _do_nothing(*_: object) -> None: ...


class _SimulatedRows:
    """Implements asterism.engine.inference.running_batch.BatchRows."""

    def __init__(self) -> None:
        self._assigned: dict[int, tuple[int, NDArray[np.int32]]] = {}  # trajectory and token ids, by row

    def assign(self, joining: list[GeneratedSequence]) -> None:
        for sequence in joining:
            self._assigned[sequence.row] = sequence.sequence_id, sequence.token_ids

    def append_pages(self, *_: object) -> None: ...

    def activate(self, *_: object) -> None: ...

    def read_back(self, row: int, first: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        trajectory_id, token_ids = self._assigned[row]
        generated = build_trajectory_ids(trajectory_id, end - len(token_ids))
        return np.concatenate((token_ids, generated)), np.zeros(end - first, np.float32)


def _count_pairs(chunks: Sequence[PrefillChunk]) -> float:
    """Count the query-key pairs of attention over these prompt tokens: each token reads the tokens up to itself."""
    return sum([(chunk.end - chunk.start) * (chunk.start + chunk.end + 1) / 2 for chunk in chunks])
