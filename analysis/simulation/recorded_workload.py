"""Load a step of a recorded run: its trajectories as a workload, its engines as a cluster.

The sources are the event logs of the rollout and of the head (asterism.bus.event_log.reader).

step = load_recorded_step(RunFolder(Path("runs/demo")))
outcome = simulate(step.workload, step.cluster, "kv_lookahead")  # compare with step.measured_s
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import inf
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from msgspec.structs import replace

from asterism.analysis.metric_lines import AnalysisError
from asterism.analysis.simulation.calibration import build_load_intervals, fit_costs, scale_costs
from asterism.analysis.simulation.cluster_model import SimulatedCluster
from asterism.analysis.simulation.workload import PlannedTurn, TrajectoryPlan, Workload, build_plan
from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.bus.codec import decode
from asterism.bus.event_log.reader import read_events
from asterism.bus.messages import (
    AnyMessage,
    CodeFinished,
    EngineJoined,
    EngineLoadReported,
    EnvironmentReturned,
    EvaluationRequested,
    LeaseGranted,
    LeaseRequested,
    StartGroup,
    StepCollected,
    StepRequested,
    TrajectoryFinished,
    TurnGenerated,
)
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.arbiter.arbiter import PolicyName

_MIN_INTERVALS = 4  # fewest intervals of work that determine the machine's speed


class RecordedStep(NamedTuple):
    """A recorded step. `measured_s`: from the rollout's first StartGroup to the head's last TrajectoryFinished."""

    step: int
    workload: Workload
    cluster: SimulatedCluster
    policy: PolicyName
    measured_s: float
    left_out: int  # trajectories that failed or were aborted
    overlaps: bool  # other steps ran at the same time; they are not simulated


class _TimeWindow(NamedTuple):
    """A step's time in seconds since the epoch: from its request to the next request."""

    since: float
    until: float


class _FinishedTrajectory(NamedTuple):
    at: float
    message: TrajectoryFinished


class _RolloutHistory:
    """Messages of the rollout about trajectories that started in a window."""

    def __init__(self, log: Path, window: _TimeWindow) -> None:
        self.group_by_trajectory: dict[int, int] = {}
        self.group_started_at: dict[int, float] = {}
        self.turn_times: defaultdict[int, _TurnTimes] = defaultdict(lambda: _TurnTimes({}, {}))
        self.granted_at: dict[tuple[int, int], float] = {}  # grant minus wait, by trajectory and lease
        self._last_turn: dict[int, int] = {}
        kinds = ("StartGroup", "LeaseGranted", "TurnGenerated", "CodeFinished", "EnvironmentReturned")
        for at, message in _read_messages(log, kinds):
            if at >= window.since:  # an earlier launch may have used the same ids
                self._on_message(at, message, window.until)

    def _on_message(self, at: float, message: AnyMessage, until: float) -> None:
        match message:
            case StartGroup(purpose="train") as group if at < until:
                self.group_started_at[group.group_id] = at
                for number in range(group.first_trajectory_id, group.first_trajectory_id + group.size):
                    self.group_by_trajectory[number] = group.group_id
            case LeaseGranted(trajectory_id=number, lease=lease, waited_s=waited_s):
                self.granted_at[number, lease] = at - waited_s
            case TurnGenerated(trajectory_id=number, turn=turn, finish="stop"):
                self.turn_times[number].stopped_at[turn] = at
                self._last_turn[number] = turn
            case CodeFinished(trajectory_id=number) | EnvironmentReturned(trajectory_id=number) if (
                number in self._last_turn
            ):
                self.turn_times[number].answered_at[self._last_turn[number]] = at
            case _:
                pass


class _TurnTimes(NamedTuple):
    """The times at which each turn of a trajectory stopped, and at which its last call was answered."""

    stopped_at: dict[int, float]
    answered_at: dict[int, float]

    def compute_tool_s(self, turn: int) -> float:
        return max(0.0, self.answered_at[turn] - self.stopped_at[turn]) if turn in self.answered_at else 0.0


def load_recorded_step(folder: RunFolder, step: int | None = None) -> RecordedStep:
    """Load `step`, by default the last collected one. Raises AnalysisError, which names the file."""
    run = load_run(folder.config)
    rollout_log, head_log = folder.events / f"{ROLLOUT}.sqlite", folder.events / f"{HEAD}.sqlite"
    number, window = _choose_step(head_log, step)
    history = _RolloutHistory(rollout_log, window)
    finished = _read_finished(head_log, history, window.since)
    if not finished:
        raise AnalysisError(f"{head_log}: no trajectory of step {number} ended")
    latency_s = _measure_latency_s(head_log, history, window.since)
    name = f"step {number} of {run.name}"
    cluster = _load_cluster(head_log, window, run.engine.max_running)
    return RecordedStep(
        step=number,
        workload=_build_workload(name, history, finished, run, latency_s),
        cluster=replace(cluster, chunk_tokens=run.engine.prefill_tokens, latency_s=latency_s),
        policy=run.arbiter.policy,
        measured_s=max(each.at for each in finished) - min(history.group_started_at.values()),
        left_out=len(history.group_by_trajectory) - len(finished),
        overlaps=run.rl.max_staleness > 0,
    )


def _load_cluster(head_log: Path, window: _TimeWindow, max_running: int) -> SimulatedCluster:
    """Load the engines that joined first under each name. They must be equal.

    The proportions of the costs are fitted to all reports, their level to the reports of the window.
    Raises AnalysisError.
    """
    joined: dict[str, EngineJoined] = {}
    reports: list[tuple[float, EngineLoadReported]] = []
    for at, message in _read_messages(head_log, ("EngineJoined", "EngineLoadReported")):
        if isinstance(message, EngineJoined):
            joined.setdefault(message.engine, message)
        elif isinstance(message, EngineLoadReported):
            reports.append((at, message))
    kinds = {(each.kv_tokens, each.page_tokens) for each in joined.values()}
    if len(kinds) != 1:
        raise AnalysisError(f"{head_log}: the engines differ in capacity or page size: {sorted(kinds)}")
    ((kv_tokens, page_tokens),) = kinds
    try:
        cost = fit_costs(build_load_intervals(report for _, report in reports))
    except ValueError as error:
        raise AnalysisError(f"{head_log}: {error}") from error
    window_intervals = build_load_intervals(report for at, report in reports if window.since <= at < window.until)
    if len(window_intervals) >= _MIN_INTERVALS:
        cost = scale_costs(cost, window_intervals)
    return SimulatedCluster("the recorded engines", len(joined), kv_tokens, cost, page_tokens, max_running)


# ---------------------------------------------------------------- reading


def _read_messages(log: Path, kinds: Sequence[str]) -> Iterator[tuple[float, AnyMessage]]:
    """Yield times and messages in order. Raises AnalysisError."""
    if not log.exists():
        raise AnalysisError(f"{log}: no such event log; was the run started with log.events = false?")
    try:
        for event, _ in read_events(log, kinds=kinds):
            yield event.time, decode(event.frame).message
    except ValueError as error:
        raise AnalysisError(f"{log}: cannot be read as an event log: {error}") from error


def _choose_step(head_log: Path, step: int | None) -> tuple[int, _TimeWindow]:
    """Return the step's number and time. The last request of a step counts, for example after a crash."""
    kinds = ("StepRequested", "EvaluationRequested", "RunStarted", "StepCollected")
    events = list(_read_messages(head_log, kinds))
    asked = {message.step: at for at, message in events if isinstance(message, StepRequested)}
    collected = {message.step for _, message in events if isinstance(message, StepCollected)}
    if not asked.keys() & collected:
        raise AnalysisError(f"{head_log}: no training step was collected")
    if step is None:
        step = max(asked.keys() & collected)
    elif step not in asked.keys() & collected:
        there = ", ".join(map(str, sorted(asked.keys() & collected)))
        raise AnalysisError(f"{head_log}: step {step} was not collected; collected steps: {there}")
    since = asked[step]
    borders = [at for at, message in events if at > since and not _is_alongside(message)]
    return step, _TimeWindow(since, min(borders, default=inf))


def _is_alongside(message: AnyMessage) -> bool:
    """Return whether rollouts of a step continue after the event."""
    return isinstance(message, StepCollected) or (
        isinstance(message, EvaluationRequested) and message.label.startswith("step_")
    )


def _read_finished(log: Path, history: _RolloutHistory, since: float) -> list[_FinishedTrajectory]:
    """Return the finished trajectories in order of their ends."""
    return [
        _FinishedTrajectory(at, message)
        for at, message in _read_messages(log, ("TrajectoryFinished",))
        if isinstance(message, TrajectoryFinished)
        and message.trajectory_id in history.group_by_trajectory
        and at >= since
    ]


def _measure_latency_s(head_log: Path, history: _RolloutHistory, since: float) -> float:
    """Compute the mean latency of a message: from the request of a lease to its grant, without the wait."""
    asked = {
        (message.trajectory_id, message.lease): at
        for at, message in _read_messages(head_log, ("LeaseRequested",))
        if isinstance(message, LeaseRequested) and at >= since
    }
    latencies = [decided - asked[lease] for lease, decided in history.granted_at.items() if lease in asked]
    return max(0.0, mean(latencies)) if latencies else 0.0


# ---------------------------------------------------------------- conversion to a workload


def _build_workload(
    name: str,
    history: _RolloutHistory,
    finished: Sequence[_FinishedTrajectory],
    run: RunConfig,
    latency_s: float,
) -> Workload:
    ordered = sorted((each.message for each in finished), key=lambda each: (each.group_id, each.trajectory_id))
    plans = [
        _build_plan(number, each, history.turn_times[each.trajectory_id], run.response_tokens, latency_s)
        for number, each in enumerate(ordered)
    ]
    return Workload(
        name,
        tuple(plans),
        run.response_tokens,
        max_turns=max(task.get_dialogue().max_turns for task in run.resolved_tasks),
        grading_s=mean(each.grading_s for each in ordered),
        started_after=_find_replacements(history, finished),
    )


def _find_replacements(history: _RolloutHistory, finished: Sequence[_FinishedTrajectory]) -> dict[int, int]:
    """Map each group that started after the end of another group to the latest such group."""
    living = Counter(history.group_by_trajectory.values())
    after: dict[int, int] = {}
    ended: list[tuple[float, int]] = []
    for each in finished:
        group = each.message.group_id
        living[group] -= 1
        if not living[group]:
            ended.append((each.at, group))
    for group, at in history.group_started_at.items():
        before = [other for end, other in ended if end <= at]
        if before:
            after[group] = before[-1]
    return after


def _build_plan(
    number: int, finished: TrajectoryFinished, times: _TurnTimes, limit: int, latency_s: float
) -> TrajectoryPlan:
    record = finished.record
    runs = [
        (generated == 1, sum(1 for _ in run)) for generated, run in groupby(record.loss_mask[record.prompt_tokens :])
    ]

    def compute_tool_s(turn: int) -> float:
        return max(0.0, times.compute_tool_s(turn) - 2 * latency_s)

    turns: list[PlannedTurn] = []
    for generated, tokens in runs:
        if generated:
            turns.append(PlannedTurn(tokens))
        else:
            turns[-1] = turns[-1]._replace(result_tokens=tokens, tool_s=compute_tool_s(len(turns) - 1))
    if finished.ending == "length" and turns:
        last, place = turns[-1], len(turns) - 1
        stopped = place in times.stopped_at  # a tool's result exceeded the limit
        turns[-1] = (
            PlannedTurn(last.tokens, compute_tool_s(place), limit) if stopped else PlannedTurn(last.tokens + limit)
        )
    return build_plan(number, finished.group_id, record.prompt_tokens, turns, limit)
