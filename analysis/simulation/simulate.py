"""Simulate the rollouts of one step: the real deciders, with engines and tools in virtual time.

The deciders are the arbiter and the rollout. A message between two processes takes the cluster's
`latency_s`; a message within a process takes no time. A group starts at time 0, or when the group
that it replaces ends. The makespan is the time at which the last trajectory ends. A LogRecorder
writes the log lines from which the report of a real run is built.
"""

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from statistics import mean

import msgspec

from asterism.analysis.simulation.bounds import compute_bounds
from asterism.analysis.simulation.cluster_model import SimulatedCluster
from asterism.analysis.simulation.log_recorder import LogRecorder
from asterism.analysis.simulation.oracle import build_arbiter
from asterism.analysis.simulation.outcome import SimulatedPolicy, SimulationOutcome, TailStatistics, TimelineSample
from asterism.analysis.simulation.simulated_engine import SimulatedEngine
from asterism.analysis.simulation.synthetic_tokens import build_dialogue_rules, build_groups
from asterism.analysis.simulation.timeline import VirtualTimeline
from asterism.analysis.simulation.workload import TrajectoryPlan, Workload
from asterism.bus.addresses import ARBITER, BUFFER, EXECUTOR, LAUNCHER, ROLLOUT, name_generator
from asterism.bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    AnyMessage,
    CacheReleased,
    CodeFinished,
    CodeOk,
    CodeRequested,
    EngineJoined,
    EngineLoadReported,
    ExecutorJoined,
    LeaseGranted,
    LeaseReleased,
    LeaseRequested,
    LedgerReported,
    Output,
    StartGroup,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnGenerated,
    TurnRequested,
)
from asterism.engine.prefix_tracker import PrefixTracker
from asterism.policies.decider import Send
from asterism.policies.rollout.rollout import Rollout

_SAMPLE_S = 1.0
_MIN_SAMPLES = 100  # minimum of samples, for a short step
_TAIL_SHARE = 0.01
_MAX_STUCK_SHOWN = 8
_EXECUTOR_ADDRESS = f"{EXECUTOR}/1"

# Arguments: the time, an event of the arbiter, and its decision.
ArbiterObserver = Callable[[float, AnyMessage, Sequence[Send]], None]
# Arguments: the virtual time, the number of ended trajectories, and the number of all trajectories.
ProgressObserver = Callable[[float, int, int], None]


class Deadlock(Exception):
    """The event queue is empty, but trajectories have not ended: a bug in a decider."""


class Simulation:
    """Implements asterism.analysis.simulation.simulated_engine.EngineEnvironment."""

    def __init__(
        self,
        workload: Workload,
        cluster: SimulatedCluster,
        policy: SimulatedPolicy,
        recording: LogRecorder | None = None,
        observe: ArbiterObserver | None = None,
        earlier: Workload | None = None,
        on_progress: ProgressObserver | None = None,
    ) -> None:
        self._on_progress = on_progress
        self.timeline = VirtualTimeline()
        self.plans: Mapping[int, TrajectoryPlan] = {plan.trajectory_id: plan for plan in workload.plans}
        self.prefix_tracker = PrefixTracker()
        self.workload = workload
        names = [name_generator(number) for number in range(cluster.engines)]
        self.engines = {name: SimulatedEngine(name, cluster, self) for name in names}
        self.arbiter = build_arbiter(policy, workload, earlier)
        self.rollout = Rollout({"": build_dialogue_rules(workload)})
        self.finished: dict[int, tuple[float, TrajectoryFinished]] = {}
        self.failed = 0
        self.first_lease_at: dict[int, float] = {}
        self.lease_waits_s: defaultdict[str, float] = defaultdict(float)
        self.migrations = self.leases = self.decisions = 0
        self.decision_s = 0.0
        self.samples: list[TimelineSample] = []
        self._cluster = cluster
        self._latency_s = cluster.latency_s
        self._sample_s = min(_SAMPLE_S, compute_bounds(workload, cluster).lower_s / _MIN_SAMPLES)
        self._recording = recording
        self._observe = observe
        self._groups = {group.group_id: group for group in build_groups(workload)}
        self._live_by_group = Counter(plan.group_id for plan in workload.plans)  # number of live trajectories
        self._replacement_groups: defaultdict[int, list[int]] = defaultdict(list)
        for group, before in workload.started_after.items():
            self._replacement_groups[before].append(group)
        self._lease_causes: dict[int, str] = {}
        self._receivers = self._build_receivers()
        if recording is not None:
            recording.observe(self.rollout)

    def _build_receivers(self) -> dict[str, Callable[[AnyMessage], None]]:
        return {
            ARBITER: self._decide_arbiter,
            ROLLOUT: self._decide_rollout,
            BUFFER: self._collect,
            _EXECUTOR_ADDRESS: self._execute,
            **{name: self._make_engine_receiver(engine) for name, engine in self.engines.items()},
        }

    def run(self) -> None:
        """Run until the event queue is empty. Raises Deadlock."""
        cluster = self._cluster
        for name, engine in self.engines.items():
            self._decide_arbiter(EngineJoined(name, cluster.kv_tokens, cluster.page_tokens, 0))
            if self._recording is not None:
                page = cluster.page_tokens
                self._recording.on_engine_started(0.0, name, engine.num_pages * page, page)
        self._decide_rollout(ExecutorJoined(_EXECUTOR_ADDRESS, 1 << 20))
        for number, group in self._groups.items():
            if number not in self.workload.started_after:
                self._decide_rollout(group)
        self.timeline.call_at(0.0, self._sample, None)
        self.timeline.run()
        if self._recording is not None:
            self._recording.close(max((at for at, _ in self.finished.values()), default=self.timeline.now))
        if self.live:
            raise Deadlock(f"{self.live} trajectories are stuck: {self._describe_stuck()}")

    def _describe_stuck(self) -> str:
        stuck = (
            f"{each.trajectory_id} {each.phase} in turn {each.turn} on {each.engine or 'no engine'}"
            for each in self.rollout.trajectories.values()
        )
        return "; ".join(islice(stuck, _MAX_STUCK_SHOWN))

    @property
    def live(self) -> int:
        return len(self.plans) - len(self.finished) - self.failed

    # ---------------------------------------------------------------- EngineEnvironment

    def deliver_turn(self, turn: TurnGenerated) -> None:
        self.timeline.call_at(self.timeline.now + self._latency_s, self._decide_rollout, turn)

    def report_load(self, report: EngineLoadReported) -> None:
        if self._recording is not None:
            self._recording.on_engine_load(self.timeline.now, report)
        self.timeline.call_at(self.timeline.now + self._latency_s, self._decide_arbiter, report)

    # ---------------------------------------------------------------- receivers

    def _send(self, to: str, message: AnyMessage, *, local: bool = False) -> None:
        if to == LAUNCHER:
            if self._recording is not None and isinstance(message, LedgerReported):
                self._recording.on_ledger_reported(self.timeline.now, message)
            return
        self.timeline.call_at(self.timeline.now + (0.0 if local else self._latency_s), self._receivers[to], message)

    def _decide_arbiter(self, message: AnyMessage) -> None:
        began = time.thread_time()  # excludes other work of the host
        sends = self.arbiter.decide(self.timeline.now, message)
        self.decision_s += time.thread_time() - began
        self.decisions += 1
        if self._observe is not None:
            self._observe(self.timeline.now, message, sends)
        for send in sends:
            if isinstance(send.message, LeaseGranted):
                self._record_lease(send.message)
            self._send(send.to, send.message, local=send.to == ARBITER)

    def _record_lease(self, granted: LeaseGranted) -> None:
        trajectory_id = granted.trajectory_id
        self.leases += 1
        self.first_lease_at.setdefault(trajectory_id, self.timeline.now)
        self.lease_waits_s[self._lease_causes[trajectory_id]] += granted.waited_s

    def _decide_rollout(self, message: AnyMessage) -> None:
        if self._recording is not None:
            self._recording.write_counts(self.timeline.now)
        sends = self.rollout.decide(self.timeline.now, message)
        self.migrations += sum(each.migrations for each in self.rollout.ended.values())
        if self._recording is not None:
            self._recording.on_rollout_decision(self.timeline.now, message, sends)
        for send in sends:
            if isinstance(send.message, LeaseRequested):
                self._record_request(send.message, message)
            self._send(send.to, send.message)

    def _record_request(self, request: LeaseRequested, cause: AnyMessage) -> None:
        within = isinstance(cause, TurnGenerated)
        kind = "to begin" if isinstance(cause, StartGroup) else "within a turn" if within else "after a tool"
        self._lease_causes[request.trajectory_id] = kind

    def _make_engine_receiver(self, engine: SimulatedEngine) -> Callable[[AnyMessage], None]:
        def receive(message: AnyMessage) -> None:
            match message:
                case TurnRequested():
                    engine.submit(message)
                case CacheReleased(trajectory_id=trajectory_id, lease=lease):
                    engine.release_cache(trajectory_id, lease)
                case LeaseReleased(trajectory_id=trajectory_id):
                    engine.release_cache(trajectory_id)
                case _:
                    raise AssertionError(f"an engine does not accept {message}")

        return receive

    def _execute(self, message: AnyMessage) -> None:
        if isinstance(message, CodeRequested):
            turn = self.plans[message.trajectory_id].turns[self.rollout.trajectories[message.trajectory_id].turn - 1]
            outcome = CodeOk(Output(str(turn.result_tokens)))
            answer = CodeFinished(message.trajectory_id, message.call, outcome, turn.tool_s, _EXECUTOR_ADDRESS)
            self.timeline.call_at(self.timeline.now + turn.tool_s + self._latency_s, self._decide_rollout, answer)
        elif isinstance(message, AnswerSubmitted):
            grading_s = self.workload.grading_s
            graded = AnswerGraded(message.trajectory_id, 1.0, grading_s, _EXECUTOR_ADDRESS)
            self.timeline.call_at(self.timeline.now + grading_s + self._latency_s, self._decide_rollout, graded)

    def _collect(self, message: AnyMessage) -> None:
        if isinstance(message, TrajectoryFailed):
            self.failed += 1
        elif isinstance(message, TrajectoryFinished):
            record = msgspec.structs.replace(message.record, token_ids=b"", logprobs=b"", versions=b"")
            slim = msgspec.structs.replace(message, record=record)
            self.finished[message.trajectory_id] = (self.timeline.now - self._latency_s, slim)
        else:
            return
        self._live_by_group[message.group_id] -= 1
        if not self._live_by_group[message.group_id]:
            for follower in self._replacement_groups[message.group_id]:
                self._send(ROLLOUT, self._groups[follower])

    def _sample(self, _: None) -> None:
        if self._on_progress is not None:
            self._on_progress(self.timeline.now, len(self.plans) - self.live, len(self.plans))
        running = waiting = used = 0
        for engine in self.engines.values():
            engine.update_counters()
            load = engine.get_load()
            running += load.running
            waiting += load.waiting
            used += load.used_tokens
        leasing, calling = (self.rollout.num_by_phase[phase] for phase in ("leasing", "calling"))
        self.samples.append(TimelineSample(self.timeline.now, running, waiting, used, self.live, leasing, calling))
        if self.live and not self.timeline.is_empty:  # otherwise no event can follow
            self.timeline.call_at(self.timeline.now + self._sample_s, self._sample, None)


def simulate(
    workload: Workload,
    cluster: SimulatedCluster,
    policy: SimulatedPolicy,
    seed: int = 0,
    recording: LogRecorder | None = None,
    observe: ArbiterObserver | None = None,
    earlier: Workload | None = None,
    on_progress: ProgressObserver | None = None,
) -> SimulationOutcome:
    """Simulate a step. `seed` is only copied to the outcome. `observe` is called after each decision of the arbiter.
    The arbiter learns response lengths from `earlier`, an earlier step. `on_progress` is called with each sample.

    Raises ValueError if the workload is empty or an engine cannot hold its longest trajectory;
    OSError if the recording cannot be written.
    """
    if not workload.plans:
        raise ValueError(f"{workload.name}: the workload has no trajectories")
    longest = max(plan.prompt_tokens for plan in workload.plans) + workload.response_tokens
    if cluster.kv_tokens < longest + cluster.page_tokens:
        raise ValueError(
            f"{cluster.name}: an engine has {cluster.kv_tokens} KV tokens, a trajectory may need {longest}"
        )
    began = time.process_time()
    simulation = Simulation(workload, cluster, policy, recording, observe, earlier, on_progress)
    gc_was_enabled = gc.isenabled()
    gc.disable()  # a collection scans a million live objects and finds hardly any cycles
    try:
        simulation.run()
    finally:
        if gc_was_enabled:
            gc.enable()
    return _build_outcome(simulation, cluster, policy, seed, time.process_time() - began)


def _build_outcome(
    simulation: Simulation, cluster: SimulatedCluster, policy: SimulatedPolicy, seed: int, took_s: float
) -> SimulationOutcome:
    engines, workload = list(simulation.engines.values()), simulation.workload
    loads = [engine.get_load() for engine in engines]
    num_pages = sum(engine.num_pages for engine in engines)
    makespan_s = max(at for at, _ in simulation.finished.values())
    over_pages = makespan_s * num_pages
    over_slots = makespan_s * cluster.max_running * cluster.engines
    return SimulationOutcome(
        workload=workload.name,
        cluster=cluster.name,
        policy=policy,
        seed=seed,
        makespan_s=makespan_s,
        bounds=compute_bounds(workload, cluster),
        trajectories=len(simulation.finished),
        failed=simulation.failed,
        generated_tokens=sum(load.generated_tokens for load in loads),
        slots=cluster.max_running * cluster.engines,
        kv_tokens=cluster.page_tokens * num_pages,
        kv_utilization=sum(engine.used_page_s for engine in engines) / over_pages,
        slot_utilization=sum(engine.running_s for engine in engines) / over_slots,
        most_kv=max(engine.peak_pages / engine.num_pages for engine in engines),
        waits_s=_sum_waits_s(simulation),
        evictions=sum(engine.evicted_caches for engine in engines),
        evicted_tokens=sum(load.evicted_tokens for load in loads),
        preemptions=sum(load.preempted for load in loads),
        overflows=sum(engine.overflows for engine in engines),
        prefilled_tokens=sum(load.prefilled_tokens for load in loads),
        recomputed_tokens=sum(load.recomputed_tokens for load in loads),
        migrations=simulation.migrations,
        leases=simulation.leases,
        tail=_build_tail(simulation),
        decisions=simulation.decisions,
        decision_s=simulation.decision_s / simulation.decisions,
        simulated_in_s=took_s,
        timeline=tuple(simulation.samples),
    )


def _sum_waits_s(simulation: Simulation) -> dict[str, float]:
    engines, ended = simulation.engines.values(), [finished for _, finished in simulation.finished.values()]
    queued_s = sum(engine.queued_s for engine in engines)
    prefilling_s = sum(engine.prefilling_s for engine in engines)
    return {
        **{f"lease {kind}": simulation.lease_waits_s[kind] for kind in ("to begin", "after a tool", "within a turn")},
        "engine's queue": queued_s,
        "prefill": prefilling_s,
        "decode": sum(each.generation_s for each in ended) - queued_s - prefilling_s,
        "tools": sum(each.tools_s for each in ended),
        "grading": sum(each.grading_s for each in ended),
    }


def _build_tail(simulation: Simulation) -> TailStatistics:
    last = sorted(simulation.finished.values(), key=lambda ending: ending[0])
    last = last[-max(1, round(_TAIL_SHARE * len(last))) :]
    return TailStatistics(
        trajectories=len(last),
        began_s=mean(simulation.first_lease_at[each.trajectory_id] for _, each in last),
        first_end_s=last[0][0],
        last_end_s=last[-1][0],
        waited_s=mean(each.lease_wait_s for _, each in last),
        tokens=mean(each.record.num_tokens for _, each in last),
    )
