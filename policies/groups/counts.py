"""Counters over a step's trajectories: outcomes, failures, lengths."""

import re
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from asterism.bus.messages import (
    LengthCounts,
    LengthsMeasured,
    StartGroup,
    StepCounts,
    TaskCounts,
    TrajectoryAborted,
    TrajectoryEnd,
    TrajectoryFailed,
    TrajectoryFinished,
)
from asterism.configs.schema.success import SuccessRule
from asterism.policies.groups.selection import GroupSelection
from asterism.policies.task_counts import add_by_name, add_components, add_counts, count_group, count_trajectory

_ROW_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")  # values of a row in the text of an exception
_MAX_KIND_CHARACTERS = 200


def add_trajectory(
    counts: StepCounts, start: StartGroup, event: TrajectoryFinished | TrajectoryFailed, success: SuccessRule
) -> StepCounts:
    counts = _add_everywhere(counts, start, count_trajectory(event, success))
    if isinstance(event, TrajectoryFailed):
        return counts
    return replace(
        counts,
        components=add_components(counts.components, event.components),
        endings={**counts.endings, event.ending: counts.endings.get(event.ending, 0) + 1},
        tools=add_by_name(counts.tools, event.tools),
        generated_tokens=counts.generated_tokens + sum(event.record.loss_mask),
        lease_wait_s=counts.lease_wait_s + event.lease_wait_s,
        generation_s=counts.generation_s + event.generation_s,
        tools_s=counts.tools_s + event.tools_s,
        grading_s=counts.grading_s + event.grading_s,
    )


def add_group_selection(counts: StepCounts, start: StartGroup, selection: GroupSelection) -> StepCounts:
    dropped = {each: counts.dropped.get(each, 0) + count for each, count in selection.dropped.items()}
    return replace(_add_everywhere(counts, start, count_group(selection.verdict)), dropped=dropped)


def _add_everywhere(counts: StepCounts, start: StartGroup, added: TaskCounts) -> StepCounts:
    """Add to the totals, and to the counts of the group's task and evaluation set."""
    return replace(
        counts,
        totals=add_counts(counts.totals, added),
        tasks=add_by_name(counts.tasks, {start.task: added}),
        sets=add_by_name(counts.sets, {start.evaluation_set: added}),
    )


def parse_failed_component(cause: str) -> str:
    """Return the infrastructure component that failed: the part of the cause before the colon."""
    return cause.partition(":")[0]


def classify_failure(cause: str) -> str:
    """Return the kind of a failure: the first line of its cause, without the values that differ between rows."""
    return _ROW_VALUES.sub("…", cause.partition("\n")[0])[:_MAX_KIND_CHARACTERS]


def _count_length(trajectory: TrajectoryFinished) -> LengthCounts:
    return LengthCounts(1, trajectory.record.response_tokens, int(trajectory.ending == "length"))


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
            self.started = add_counts(self.started, _count_length(event))
        elif isinstance(event, TrajectoryAborted):
            self.aborted += 1
            self.started = add_counts(self.started, LengthCounts(1, event.response_tokens))

    def add_taken_group(self, finished: Iterable[TrajectoryFinished]) -> None:
        for trajectory in finished:
            self.taken = add_counts(self.taken, _count_length(trajectory))

    def to_message(self, step: int) -> LengthsMeasured:
        return LengthsMeasured(step, self.taken, self.started, self.aborted, self.late)
