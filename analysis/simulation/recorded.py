"""A recorded run as something to simulate: a step's trajectories as a workload, its engines as a cluster.

Read from the event logs of the rollout and of the head (bus.event_reading).

step = recorded_step(RunFolder(Path("runs/demo")))
outcome = simulate(step.workload, step.cluster, "kv_lookahead")       # beside step.measured_s
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import inf
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from msgspec.structs import replace

from analysis.metrics import AnalysisError
from analysis.simulation.calibration import calibrated, rows_of, scaled_to
from analysis.simulation.model import Cluster
from analysis.simulation.workload import Plan, Turn, Workload, plan_of
from bus.codec import decode
from bus.event_reading import read_events
from bus.messages import (
    AnyMessage,
    CodeFinished,
    EngineJoined,
    EngineLoadReported,
    LeaseGranted,
    LeaseRequested,
    StartGroup,
    StepCollected,
    StepRequested,
    TrajectoryFinished,
    TurnGenerated,
)
from configs.load import load_resolved
from configs.run_folder import RunFolder
from policies.scheduling import PolicyName

_LEAST_ROWS = 4  # stretches of work from which the machine's speed is told


class RecordedStep(NamedTuple):
    """`measured_s`: from when the rollout heard of the first group until the head had heard of the last trajectory."""

    step: int
    workload: Workload
    cluster: Cluster
    policy: PolicyName
    measured_s: float
    left_out: int  # trajectories that infrastructure lost, or that were aborted
    overlaps: bool  # other steps' trajectories ran beside it, which are not simulated


class _Window(NamedTuple):
    """Of a step, in seconds since the epoch: from when it was asked for until something else was."""

    since: float
    until: float


class _Finished(NamedTuple):
    at: float
    message: TrajectoryFinished


class _Heard:
    """What the rollout heard of the trajectories that were started in a window."""

    def __init__(self, log: Path, window: _Window) -> None:
        self.group_of: dict[int, int] = {}  # by trajectory
        self.started: dict[int, float] = {}  # by group
        self.times: defaultdict[int, _Times] = defaultdict(lambda: _Times({}, {}))
        self.granted: dict[tuple[int, int], float] = {}  # by trajectory and lease: when, without the wait for room
        self._turn: dict[int, int] = {}
        kinds = ("StartGroup", "LeaseGranted", "TurnGenerated", "CodeFinished")
        for at, message in _messages(log, kinds):
            if at >= window.since:  # an earlier life of the run has given the same numbers
                self._hear(at, message, window.until)

    def _hear(self, at: float, message: AnyMessage, until: float) -> None:
        match message:
            case StartGroup(purpose="train") as group if at < until:
                self.started[group.group_id] = at
                for number in range(group.first_trajectory_id, group.first_trajectory_id + group.size):
                    self.group_of[number] = group.group_id
            case LeaseGranted(trajectory_id=number, lease=lease, waited_s=waited_s):
                self.granted[number, lease] = at - waited_s
            case TurnGenerated(trajectory_id=number, turn=turn, finish="stop"):
                self.times[number].stopped[turn] = at
                self._turn[number] = turn
            case CodeFinished(trajectory_id=number) if number in self._turn:
                self.times[number].answered[self._turn[number]] = at
            case _:
                pass


class _Times(NamedTuple):
    """Of one trajectory: when each turn had stopped, and when the last of its calls was answered."""

    stopped: dict[int, float]
    answered: dict[int, float]

    def tool_s(self, turn: int) -> float:
        return max(0.0, self.answered[turn] - self.stopped[turn]) if turn in self.answered else 0.0


def recorded_step(folder: RunFolder, step: int | None = None) -> RecordedStep:
    """Without a number the last one that was collected. Raises configs.errors.UnusableInput, which names the file."""
    run = load_resolved(folder.config)
    rollout_log, head_log = folder.events / "rollout-0.sqlite", folder.events / "head.sqlite"
    number, window = _chosen(head_log, step)
    heard = _Heard(rollout_log, window)
    finished = _finished(head_log, heard, window.since)
    if not finished:
        raise AnalysisError(f"{head_log}: no trajectory of step {number} has ended")
    latency_s = _latency_s(head_log, heard, window.since)
    workload = _workload(heard, finished, run.dialogue.response_tokens, latency_s)
    try:
        cluster = recorded_cluster(head_log, max_running=run.engine.max_running, since=window.since, until=window.until)
    except ValueError as error:
        raise AnalysisError(str(error)) from error
    return RecordedStep(
        step=number,
        workload=replace(workload, name=f"step {number} of {run.name}", max_turns=run.dialogue.max_turns),
        cluster=replace(cluster, chunk_tokens=run.engine.prefill_tokens, latency_s=latency_s),
        policy=run.arbiter.policy,
        measured_s=max(each.at for each in finished) - min(heard.started.values()),
        left_out=len(heard.group_of) - len(finished),
        overlaps=run.rl.max_staleness > 0,
    )


def recorded_workload(
    rollout_log: Path,
    head_log: Path,
    *,
    response_tokens: int,
    since: float = -inf,
    until: float = inf,
    latency_s: float = 0.0,
) -> Workload:
    """All training groups that were started in that time (seconds since the epoch): those that were started before any
    had ended at once, each other one with the end of the one before it. Numbered anew.

    A tool's latency is what the trajectory waited, from the request to the last result of the turn, without two messages
    of `latency_s`. What infrastructure lost, and what was aborted, is left out.
    """
    heard = _Heard(rollout_log, _Window(since, until))
    return _workload(heard, _finished(head_log, heard, since), response_tokens, latency_s)


def recorded_cluster(head_log: Path, *, max_running: int = 512, since: float = -inf, until: float = inf) -> Cluster:
    """The engines that joined first under each name, with costs calibrated from all reports, and the machine's speed of
    the time that is chosen. They must be equal. Raises ValueError."""
    joined: dict[str, EngineJoined] = {}
    reports: list[tuple[float, EngineLoadReported]] = []
    for at, message in _messages(head_log, ("EngineJoined", "EngineLoadReported")):
        if isinstance(message, EngineJoined):
            joined.setdefault(message.engine, message)
        elif isinstance(message, EngineLoadReported):
            reports.append((at, message))
    kinds = {(each.kv_tokens, each.page_tokens) for each in joined.values()}
    if len(kinds) != 1:
        raise ValueError(f"{head_log}: the engines' capacities and pages are not one and the same: {sorted(kinds)}")
    ((kv_tokens, page_tokens),) = kinds
    try:
        cost = calibrated(rows_of(report for _, report in reports))
    except ValueError as error:
        raise ValueError(f"{head_log}: {error}") from error
    then = rows_of(report for at, report in reports if since <= at < until)
    if len(then) >= _LEAST_ROWS:
        cost = scaled_to(cost, then)
    return Cluster("the recorded engines", len(joined), kv_tokens, cost, page_tokens, max_running)


# ---------------------------------------------------------------- what the logs hold


def _messages(log: Path, kinds: Sequence[str]) -> Iterator[tuple[float, AnyMessage]]:
    """Times and messages, in order. Raises AnalysisError."""
    if not log.exists():
        raise AnalysisError(f"{log}: there is no such event log; was the run made with log.events = false?")
    try:
        for event, _ in read_events(log, kinds=kinds):
            yield event.time, decode(event.frame).message
    except ValueError as error:
        raise AnalysisError(f"{log}: cannot be read as an event log: {error}") from error


def _chosen(head_log: Path, step: int | None) -> tuple[int, _Window]:
    """A step that was asked for twice, as after a crash, is the later one."""
    kinds = ("StepRequested", "EvaluationRequested", "RunStarted", "StepCollected")
    events = list(_messages(head_log, kinds))
    asked = {message.step: at for at, message in events if isinstance(message, StepRequested)}
    collected = {message.step for _, message in events if isinstance(message, StepCollected)}
    if not asked.keys() & collected:
        raise AnalysisError(f"{head_log}: no training step has come to its end")
    if step is None:
        step = max(asked.keys() & collected)
    elif step not in asked.keys() & collected:
        there = ", ".join(map(str, sorted(asked.keys() & collected)))
        raise AnalysisError(f"{head_log}: no step {step} that has come to its end; there are {there}")
    since = asked[step]
    borders = [at for at, message in events if at > since and not isinstance(message, StepCollected)]
    return step, _Window(since, min(borders, default=inf))


def _finished(log: Path, heard: _Heard, since: float) -> list[_Finished]:
    """In the order of their ends."""
    return [
        _Finished(at, message)
        for at, message in _messages(log, ("TrajectoryFinished",))
        if isinstance(message, TrajectoryFinished) and message.trajectory_id in heard.group_of and at >= since
    ]


def _latency_s(head_log: Path, heard: _Heard, since: float) -> float:
    """Of a message, in the mean: how long a granted lease took to the rollout."""
    asked = {
        (message.trajectory_id, message.lease): at
        for at, message in _messages(head_log, ("LeaseRequested",))
        if isinstance(message, LeaseRequested) and at >= since
    }
    taken = [decided - asked[lease] for lease, decided in heard.granted.items() if lease in asked]
    return max(0.0, mean(taken)) if taken else 0.0


# ---------------------------------------------------------------- as a workload


def _workload(heard: _Heard, finished: Sequence[_Finished], limit: int, latency_s: float) -> Workload:
    ordered = sorted((each.message for each in finished), key=lambda each: (each.group_id, each.trajectory_id))
    plans = [
        _plan(number, each, heard.times[each.trajectory_id], limit, latency_s) for number, each in enumerate(ordered)
    ]
    return Workload(
        "recorded",
        tuple(plans),
        limit,
        max_turns=max((len(plan.turns) for plan in plans), default=1),
        grading_s=mean(each.grading_s for each in ordered) if ordered else 0.0,
        after=_stand_ins(heard, finished),
    )


def _stand_ins(heard: _Heard, finished: Sequence[_Finished]) -> dict[int, int]:
    """Groups that were started when another one had ended, and that one."""
    living = Counter(heard.group_of.values())
    after: dict[int, int] = {}
    ended: list[tuple[float, int]] = []
    for each in finished:
        group = each.message.group_id
        living[group] -= 1
        if not living[group]:
            ended.append((each.at, group))
    for group, at in heard.started.items():
        before = [other for end, other in ended if end <= at]
        if before:
            after[group] = before[-1]
    return after


def _plan(number: int, finished: TrajectoryFinished, times: _Times, limit: int, latency_s: float) -> Plan:
    runs = [
        (generated == 1, sum(1 for _ in run))
        for generated, run in groupby(finished.loss_mask[finished.prompt_tokens :])
    ]

    def tool_s(turn: int) -> float:
        return max(0.0, times.tool_s(turn) - 2 * latency_s)

    turns: list[Turn] = []
    for generated, tokens in runs:
        if generated:
            turns.append(Turn(tokens))
        else:
            turns[-1] = turns[-1]._replace(result_tokens=tokens, tool_s=tool_s(len(turns) - 1))
    if finished.ending == "length" and turns:
        last, place = turns[-1], len(turns) - 1
        stopped = place in times.stopped  # it called a tool, whose result had no room any more
        turns[-1] = Turn(last.tokens, tool_s(place), limit) if stopped else Turn(last.tokens + limit)
    return plan_of(number, finished.group_id, finished.prompt_tokens, turns, limit)
