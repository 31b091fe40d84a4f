"""Counters over a step's trajectories: outcomes, failures, lengths."""

import re
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from asterism.bus.messages import (
    ComponentSum,
    LengthCounts,
    LengthsMeasured,
    StepCounts,
    TaskCounts,
    ToolCount,
    TrajectoryAborted,
    TrajectoryEnd,
    TrajectoryFailed,
    TrajectoryFinished,
    Verdict,
)
from asterism.configs.success import SuccessRule
from asterism.policies.groups.selection import GroupSelection

_ROW_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")  # values of a row in the text of an exception
_MAX_KIND_CHARACTERS = 200


def add_to_step_counts(counts: StepCounts, trajectory: TrajectoryFinished, success: SuccessRule) -> StepCounts:
    positive, ending = success.is_met(trajectory.reward, trajectory.components), trajectory.ending
    return replace(
        counts,
        trajectories=counts.trajectories + 1,
        positives=counts.positives + positive,
        reward=counts.reward + trajectory.reward,
        components=_add_components(counts.components, trajectory.components),
        endings={**counts.endings, ending: counts.endings.get(ending, 0) + 1},
        tools=_add_tools(counts.tools, trajectory.tools),
        calls=counts.calls + trajectory.calls,
        calls_failed=counts.calls_failed + trajectory.calls_failed,
        positive_calls=counts.positive_calls + (trajectory.calls if positive else 0),
        positive_calls_failed=counts.positive_calls_failed + (trajectory.calls_failed if positive else 0),
        generated_tokens=counts.generated_tokens + sum(trajectory.record.loss_mask),
        response_tokens=counts.response_tokens + trajectory.record.response_tokens,
        lease_wait_s=counts.lease_wait_s + trajectory.lease_wait_s,
        generation_s=counts.generation_s + trajectory.generation_s,
        tools_s=counts.tools_s + trajectory.tools_s,
        grading_s=counts.grading_s + trajectory.grading_s,
    )


def _add_tools(sums: dict[str, ToolCount], tools: dict[str, ToolCount]) -> dict[str, ToolCount]:
    added = dict(sums)
    for name, each in tools.items():
        before = sums.get(name, ToolCount())
        added[name] = ToolCount(before.calls + each.calls, before.timed_out + each.timed_out)
    return added


def _add_components(sums: dict[str, ComponentSum], components: dict[str, float]) -> dict[str, ComponentSum]:
    added = dict(sums)
    for name, value in components.items():
        before = sums.get(name, ComponentSum())
        added[name] = ComponentSum(before.total + value, before.trajectories + 1)
    return added


def count_task_trajectory(
    tasks: dict[str, TaskCounts], task: str, event: TrajectoryFinished | TrajectoryFailed, success: SuccessRule
) -> dict[str, TaskCounts]:
    """Add a trajectory to the counts of `task`, a task or an evaluation set. An empty name is not counted."""
    if not task:
        return tasks
    counts = tasks.get(task, TaskCounts())
    if isinstance(event, TrajectoryFailed):
        return {**tasks, task: replace(counts, trajectories_failed=counts.trajectories_failed + 1)}
    positive = success.is_met(event.reward, event.components)
    counted = replace(
        counts,
        trajectories=counts.trajectories + 1,
        positives=counts.positives + positive,
        reward=counts.reward + event.reward,
        calls=counts.calls + event.calls,
        calls_failed=counts.calls_failed + event.calls_failed,
        positive_calls=counts.positive_calls + (event.calls if positive else 0),
        positive_calls_failed=counts.positive_calls_failed + (event.calls_failed if positive else 0),
        response_tokens=counts.response_tokens + event.record.response_tokens,
    )
    return {**tasks, task: counted}


def count_task_verdict(tasks: dict[str, TaskCounts], task: str, verdict: Verdict) -> dict[str, TaskCounts]:
    if not task:
        return tasks
    counts = tasks.get(task, TaskCounts())
    counted = replace(
        counts,
        groups=counts.groups + 1,
        groups_lost=counts.groups_lost + (verdict == "lost"),
        groups_rejected=counts.groups_rejected + (verdict == "rejected"),
    )
    return {**tasks, task: counted}


def add_group_selection(counts: StepCounts, task: str, selection: GroupSelection) -> StepCounts:
    return replace(
        counts,
        groups=counts.groups + 1,
        groups_lost=counts.groups_lost + (selection.verdict == "lost"),
        groups_rejected=counts.groups_rejected + (selection.verdict == "rejected"),
        tasks=count_task_verdict(counts.tasks, task, selection.verdict),
        dropped={each: counts.dropped.get(each, 0) + count for each, count in selection.dropped.items()},
    )


def parse_failed_component(cause: str) -> str:
    """Return the infrastructure component that failed: the part of the cause before the colon."""
    return cause.partition(":")[0]


def classify_failure(cause: str) -> str:
    """Return the kind of a failure: the first line of its cause, without the values that differ between rows."""
    return _ROW_VALUES.sub("…", cause.partition("\n")[0])[:_MAX_KIND_CHARACTERS]


def _add_to_length_counts(counts: LengthCounts, trajectory: TrajectoryFinished) -> LengthCounts:
    return LengthCounts(
        trajectories=counts.trajectories + 1,
        response_tokens=counts.response_tokens + trajectory.record.response_tokens,
        overlong=counts.overlong + (trajectory.ending == "length"),
    )


class StepLengths(msgspec.Struct):
    """The lengths of the groups that one step started, until all of their trajectories have ended."""

    num_open_groups: int = 0
    step_ended: bool = False
    taken: LengthCounts = LengthCounts()
    started: LengthCounts = LengthCounts()
    aborted: int = 0
    late: int = 0

    @property
    def is_complete(self) -> bool:
        return self.step_ended and not self.num_open_groups

    def on_trajectory_ended(self, event: TrajectoryEnd, *, late: bool) -> None:
        self.late += late and not isinstance(event, TrajectoryAborted)
        if isinstance(event, TrajectoryFinished):
            self.started = _add_to_length_counts(self.started, event)
        elif isinstance(event, TrajectoryAborted):
            self.aborted += 1
            self.started = replace(
                self.started,
                trajectories=self.started.trajectories + 1,
                response_tokens=self.started.response_tokens + event.response_tokens,
            )

    def add_taken_group(self, finished: Iterable[TrajectoryFinished]) -> None:
        for trajectory in finished:
            self.taken = _add_to_length_counts(self.taken, trajectory)

    def to_message(self, step: int) -> LengthsMeasured:
        return LengthsMeasured(step, self.taken, self.started, self.aborted, self.late)
