"""One step's rollouts, simulated: the real arbiter and the real trajectories, over engines and tools in virtual time.

A message takes the cluster's `latency_s` from one process to another, and none within one. All groups are started at
time 0, or with the end of the one that they stand in for; the makespan is when the last trajectory has ended. With a
Recording, the step leaves the log lines that a real run's report is made from.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import count, groupby, islice
from statistics import mean
from typing import Any

import msgspec

from analysis.simulation.bounds import bounds_of
from analysis.simulation.engine import SimulatedEngine
from analysis.simulation.model import Cluster
from analysis.simulation.outcome import Outcome, Policy, Sample, Tail
from analysis.simulation.tokens import LengthTokenizer
from analysis.simulation.truth import Truth, lengths_of
from analysis.simulation.workload import Plan, Workload
from analysis.utilization.recording import Recording
from bus.messages import (
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
from policies.arbiter import Arbiter
from policies.decider import Send
from policies.expectations import Expectations
from policies.rollout import Rollout
from policies.trajectory import Rules

_SAMPLE_S = 1.0
_LEAST_SAMPLES = 100  # of a short step
_TAIL_SHARE = 0.01
_SHOWN_STUCK = 8
_ARBITER, _ROLLOUT, _BUFFER, _LAUNCHER = "head/arbiter", "rollout-0", "head/buffer", "launcher"
_EXECUTOR = "executor-0/1"

Observe = Callable[[float, AnyMessage, Sequence[Send]], None]  # the time, an event of the arbiter, what it has decided


class Deadlock(Exception):
    """Nothing is left to happen, and trajectories have not ended: a decider's fault."""


class Simulation:
    """Implements analysis.simulation.engine.World."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        policy: Policy,
        recording: Recording | None = None,
        observe: Observe | None = None,
        earlier: Workload | None = None,
    ) -> None:
        self.now = 0.0
        self.plans: Mapping[int, Plan] = {plan.trajectory_id: plan for plan in workload.plans}
        self.computed: dict[int, int] = {}
        self.workload = workload
        self.engines = {
            name: SimulatedEngine(name, cluster, self) for name in (f"generator-{n}" for n in range(cluster.engines))
        }
        self.arbiter = arbiter_of(policy, workload, earlier)
        self.rollout = Rollout(_rules(workload), LengthTokenizer())
        self.finished: dict[int, tuple[float, TrajectoryFinished]] = {}
        self.failed = 0
        self.began: dict[int, float] = {}
        self.lease_waits_s: defaultdict[str, float] = defaultdict(float)
        self.migrations = self.leases = self.decisions = 0
        self.decision_s = 0.0
        self.timeline: list[Sample] = []
        self.leasing = self.calling = 0  # trajectories that wait for a lease, and for their tools
        self._cluster = cluster
        self._latency_s = cluster.latency_s
        self._sample_s = min(_SAMPLE_S, bounds_of(workload, cluster).lower_s / _LEAST_SAMPLES)
        self._recording = recording
        self._observe = observe
        self._groups = {group.group_id: group for group in _groups(workload)}
        self._open = Counter(plan.group_id for plan in workload.plans)  # trajectories of each group that live
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        for group, before in workload.after.items():
            self._followers[before].append(group)
        self._asked: dict[int, str] = {}
        self._placed: dict[int, str] = {}
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = count()
        self._receivers: dict[str, Callable[[AnyMessage], None]] = {
            _ARBITER: self._decide_arbiter,
            _ROLLOUT: self._decide_rollout,
            _BUFFER: self._collect,
            _EXECUTOR: self._execute,
            **{name: self._engine_receiver(engine) for name, engine in self.engines.items()},
        }

    def run(self) -> None:
        """Until nothing is left to happen."""
        cluster = self._cluster
        for name, engine in self.engines.items():
            self._decide_arbiter(EngineJoined(name, cluster.kv_tokens, cluster.page_tokens, 0))
            if self._recording is not None:
                page = cluster.page_tokens
                self._recording.engine_started(0.0, name, engine.pages.capacity * page, page)
        self._decide_rollout(ExecutorJoined(_EXECUTOR, 1 << 20))
        for number, group in self._groups.items():
            if number not in self.workload.after:
                self._decide_rollout(group)
        self.call_at(0.0, self._sample, None)
        while self._events:
            self.now, _, callback, argument = heapq.heappop(self._events)
            callback(argument)
        if self._recording is not None:
            self._recording.close(max((at for at, _ in self.finished.values()), default=self.now))
        if self.live:
            raise Deadlock(f"{self.live} trajectories wait for ever: {self._stuck()}")

    def _stuck(self) -> str:
        stuck = (
            f"{each.trajectory_id} {each.phase} in turn {each.turn} on {each.engine or 'no engine'}"
            for each in self.rollout.trajectories.values()
        )
        return "; ".join(islice(stuck, _SHOWN_STUCK))

    @property
    def live(self) -> int:
        return len(self.plans) - len(self.finished) - self.failed

    # ---------------------------------------------------------------- the world, for engines

    def call_at(self, at: float, callback: Callable[[Any], None], argument: Any) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), callback, argument))

    def answer(self, turn: TurnGenerated) -> None:
        self.call_at(self.now + self._latency_s, self._decide_rollout, turn)

    def load(self, report: EngineLoadReported) -> None:
        if self._recording is not None:
            self._recording.engine_reported(self.now, report)
        self.call_at(self.now + self._latency_s, self._decide_arbiter, report)

    # ---------------------------------------------------------------- who receives what

    def _send(self, to: str, message: AnyMessage, *, local: bool = False) -> None:
        if to == _LAUNCHER:
            if self._recording is not None and isinstance(message, LedgerReported):
                self._recording.arbiter_reported(self.now, message)
            return
        self.call_at(self.now + (0.0 if local else self._latency_s), self._receivers[to], message)

    def _decide_arbiter(self, message: AnyMessage) -> None:
        began = time.thread_time()  # what else the host does is no decision
        sends = self.arbiter.decide(self.now, message)
        self.decision_s += time.thread_time() - began
        self.decisions += 1
        if self._observe is not None:
            self._observe(self.now, message, sends)
        for send in sends:
            if isinstance(send.message, LeaseGranted):
                self._note_lease(send.message)
            self._send(send.to, send.message, local=send.to == _ARBITER)

    def _note_lease(self, granted: LeaseGranted) -> None:
        trajectory_id = granted.trajectory_id
        self.leases += 1
        self.leasing -= 1
        self.began.setdefault(trajectory_id, self.now)
        self.lease_waits_s[self._asked[trajectory_id]] += granted.waited_s
        before = self._placed.get(trajectory_id, granted.engine)
        self.migrations += before != granted.engine
        self._placed[trajectory_id] = granted.engine

    def _decide_rollout(self, message: AnyMessage) -> None:
        sends = self.rollout.decide(self.now, message)
        if self._recording is not None:
            self._recording.rollout_decided(self.now, message, sends)
        self.calling -= isinstance(message, CodeFinished)
        for send in sends:
            if isinstance(send.message, LeaseRequested):
                self._note_request(send.message, message)
            self._send(send.to, send.message)

    def _note_request(self, request: LeaseRequested, cause: AnyMessage) -> None:
        within = isinstance(cause, TurnGenerated)
        kind = "to begin" if isinstance(cause, StartGroup) else "within a turn" if within else "after a tool"
        self._asked[request.trajectory_id] = kind
        self.leasing += 1

    def _engine_receiver(self, engine: SimulatedEngine) -> Callable[[AnyMessage], None]:
        def receive(message: AnyMessage) -> None:
            match message:
                case TurnRequested():
                    engine.request(message)
                case CacheReleased(trajectory_id=trajectory_id, lease=lease):
                    engine.forget(trajectory_id, lease)
                case LeaseReleased(trajectory_id=trajectory_id):
                    engine.forget(trajectory_id)
                case _:
                    raise AssertionError(f"an engine has no use for {message}")

        return receive

    def _execute(self, message: AnyMessage) -> None:
        if isinstance(message, CodeRequested):
            turn = self.plans[message.trajectory_id].turns[self.rollout.trajectories[message.trajectory_id].turn - 1]
            outcome = CodeOk(Output(str(turn.result_tokens)))
            answer = CodeFinished(message.trajectory_id, message.call, outcome, turn.tool_s, _EXECUTOR)
            self.calling += 1
            self.call_at(self.now + turn.tool_s + self._latency_s, self._decide_rollout, answer)
        elif isinstance(message, AnswerSubmitted):
            grading_s = self.workload.grading_s
            graded = AnswerGraded(message.trajectory_id, True, grading_s, _EXECUTOR)
            self.call_at(self.now + grading_s + self._latency_s, self._decide_rollout, graded)

    def _collect(self, message: AnyMessage) -> None:
        if isinstance(message, TrajectoryFailed):
            self.failed += 1
        elif isinstance(message, TrajectoryFinished):
            slim = msgspec.structs.replace(message, token_ids=b"", logprobs=b"", versions=b"")
            self.finished[message.trajectory_id] = (self.now - self._latency_s, slim)
        else:
            return
        self._open[message.group_id] -= 1
        if not self._open[message.group_id]:
            for follower in self._followers[message.group_id]:
                self._send(_ROLLOUT, self._groups[follower])

    def _sample(self, _: None) -> None:
        running = waiting = pages = 0
        for engine in self.engines.values():
            engine.settle()
            running += len(engine.running) + len(engine.prefilling)
            waiting += len(engine.waiting)
            pages += engine.pages.used
        used = pages * self._cluster.page_tokens
        self.timeline.append(Sample(self.now, running, waiting, used, self.live, self.leasing, self.calling))
        if self.live and self._events:  # else nothing will ever happen again
            self.call_at(self.now + self._sample_s, self._sample, None)


def arbiter_of(policy: Policy, workload: Workload, earlier: Workload | None = None) -> Arbiter:
    limit = workload.response_tokens
    if policy == "oracle":
        plans = {plan.trajectory_id: plan for plan in workload.plans}
        return Arbiter("kv_lookahead", limit, expectations=lambda: Truth(plans, limit))
    return Arbiter(policy, limit, expectations=earlier and (lambda: Expectations(limit, lengths_of(earlier))))


def _rules(workload: Workload) -> Rules:
    return Rules(
        tools=("jupyter_code",),
        response_tokens=workload.response_tokens,
        max_turns=workload.max_turns,
        max_calls_per_turn=1,
        result_characters=64,
        top_p=1.0,
        top_k=0,
        stop_token_ids=(0,),
    )


def _groups(workload: Workload) -> list[StartGroup]:
    return [_group(list(plans)) for _, plans in groupby(workload.plans, key=lambda plan: plan.group_id)]


def _group(plans: Sequence[Plan]) -> StartGroup:
    return StartGroup(
        group_id=plans[0].group_id,
        purpose="train",
        problem="",
        ground_truth="",
        prompt_ids=bytes(4 * plans[0].prompt_tokens),
        size=len(plans),
        first_trajectory_id=plans[0].trajectory_id,
        temperature=1.0,
        seed=0,
    )


def simulate(
    workload: Workload,
    cluster: Cluster,
    policy: Policy,
    seed: int = 0,
    recording: Recording | None = None,
    observe: Observe | None = None,
    earlier: Workload | None = None,
) -> Outcome:
    """`seed` is the workload's, and only told; `observe` hears what the arbiter decides; `earlier` is a step from which it
    knows lengths. Raises ValueError where there is nothing to simulate, or an engine cannot hold the longest trajectory;
    OSError where the recording cannot be written."""
    if not workload.plans:
        raise ValueError(f"{workload.name}: there is no trajectory to simulate")
    longest = max(plan.prompt_tokens for plan in workload.plans) + workload.response_tokens
    if cluster.kv_tokens < longest + cluster.page_tokens:
        raise ValueError(f"{cluster.name}: {cluster.kv_tokens} KV tokens of an engine, a trajectory may need {longest}")
    began = time.process_time()
    simulation = Simulation(workload, cluster, policy, recording, observe, earlier)
    collects = gc.isenabled()
    gc.disable()  # there are hardly any cycles, and a million live objects to look through for them
    try:
        simulation.run()
    finally:
        if collects:
            gc.enable()
    return _outcome(simulation, cluster, policy, seed, time.process_time() - began)


def _outcome(simulation: Simulation, cluster: Cluster, policy: Policy, seed: int, took_s: float) -> Outcome:
    engines, workload = list(simulation.engines.values()), simulation.workload
    makespan_s = max(at for at, _ in simulation.finished.values())
    over_pages = makespan_s * sum(engine.pages.capacity for engine in engines)
    over_slots = makespan_s * cluster.max_running * cluster.engines
    return Outcome(
        workload=workload.name,
        cluster=cluster.name,
        policy=policy,
        seed=seed,
        makespan_s=makespan_s,
        bounds=bounds_of(workload, cluster),
        trajectories=len(simulation.finished),
        failed=simulation.failed,
        generated_tokens=sum(engine.generated_tokens for engine in engines),
        slots=cluster.max_running * cluster.engines,
        kv_tokens=cluster.page_tokens * sum(engine.pages.capacity for engine in engines),
        kv_utilization=sum(engine.used_page_s for engine in engines) / over_pages,
        slot_utilization=sum(engine.running_s for engine in engines) / over_slots,
        most_kv=max(engine.most_pages / engine.pages.capacity for engine in engines),
        waits_s=_waits_s(simulation),
        evictions=sum(engine.pages.evictions for engine in engines),
        evicted_tokens=sum(engine.pages.evicted_tokens for engine in engines),
        preemptions=sum(engine.preempted for engine in engines),
        overflows=sum(engine.overflows for engine in engines),
        prefilled_tokens=sum(engine.prefilled_tokens for engine in engines),
        recomputed_tokens=sum(engine.recomputed_tokens for engine in engines),
        migrations=simulation.migrations,
        leases=simulation.leases,
        tail=_tail(simulation),
        decisions=simulation.decisions,
        decision_s=simulation.decision_s / simulation.decisions,
        simulated_in_s=took_s,
        timeline=tuple(simulation.timeline),
    )


def _waits_s(simulation: Simulation) -> dict[str, float]:
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


def _tail(simulation: Simulation) -> Tail:
    last = sorted(simulation.finished.values(), key=lambda ending: ending[0])
    last = last[-max(1, round(_TAIL_SHARE * len(last))) :]
    return Tail(
        trajectories=len(last),
        began_s=mean(simulation.began[each.trajectory_id] for _, each in last),
        first_end_s=last[0][0],
        last_end_s=last[-1][0],
        waited_s=mean(each.lease_wait_s for _, each in last),
        tokens=mean(len(each.loss_mask) for _, each in last),
    )
