"""The state of the group buffer: open groups in collections, one for each step or evaluation."""

from collections import Counter
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from asterism.bus.addresses import LAUNCHER
from asterism.bus.messages import (
    BufferCursor,
    EvaluationFinished,
    EvaluationRequested,
    FailureReported,
    GroupAborted,
    RunFailed,
    RunFinished,
    StalenessCounts,
    StartGroup,
    StepCounts,
    StepRequested,
    TrajectoryAborted,
    TrajectoryEnd,
    TrajectoryFailed,
    TrajectoryFinished,
)
from asterism.configs.schema.success import SuccessRule
from asterism.policies.decider import Send
from asterism.policies.groups.counts import StepLengths, add_trajectory, classify_failure, parse_failed_component
from asterism.policies.groups.staleness import count_other_versions

STEP_ENDED = "the step ended without it"
MAX_REPORTED_FAILURES = 20  # kinds of failures per launch


class OpenGroup(msgspec.Struct):
    start: StartGroup
    started_for_step: int  # 0: an evaluation
    rollout_address: str
    position: int  # position of the group's problem in the sequence of problems
    finished: list[TrajectoryFinished] = []
    failed: list[int] = []  # ids of trajectories lost to infrastructure failures
    aborted: list[int] = []

    def has_ended(self, trajectory_id: int) -> bool:
        finished = (trajectory.trajectory_id for trajectory in self.finished)
        return trajectory_id in self.failed or trajectory_id in self.aborted or trajectory_id in finished

    @property
    def is_complete(self) -> bool:
        return len(self.finished) + len(self.failed) + len(self.aborted) == self.start.size

    def record_end(self, event: TrajectoryEnd) -> None:
        match event:
            case TrajectoryFinished():
                self.finished.append(event)
            case TrajectoryFailed(trajectory_id=trajectory_id):
                self.failed.append(trajectory_id)
            case TrajectoryAborted(trajectory_id=trajectory_id):
                self.aborted.append(trajectory_id)

    def build_abort_message(self) -> GroupAborted:
        start = self.start
        return GroupAborted(start.group_id, start.first_trajectory_id, start.size, STEP_ENDED)


class AcceptedGroup(NamedTuple):
    """The size of a group that has been sent to the learner."""

    num_rows: int
    num_parts: int  # number of GroupAccepted messages


class GroupCollection(msgspec.Struct):
    """The groups of a step, or the trajectories of an evaluation."""

    step: int  # 0: an evaluation
    request: StepRequested | EvaluationRequested | None = None  # None: only carried groups so far
    open_groups: dict[int, OpenGroup] = {}
    accepted: dict[int, AcceptedGroup] = {}  # by group id
    num_planned_groups: int = 0  # started or carried over; a refill replaces a planned group
    positions: list[int] = []  # problem positions of all started or carried groups
    num_refills: int = 0
    counts: StepCounts = StepCounts()
    failures: dict[str, int] = {}
    first_failure: str = ""
    staleness: StalenessCounts = StalenessCounts()
    is_complete: bool = False  # a complete step may wait for earlier steps
    first_group_id: int = -1  # first group of an evaluation
    other_version_tokens: int = 0  # number of the evaluation's tokens from other weights than requested

    @property
    def is_last(self) -> bool:
        """True if the run ends with this step, before rl.steps."""
        return isinstance(self.request, StepRequested) and self.request.is_last

    def find_total_failure(self, collected: str) -> RunFailed | None:
        """Return a message if every trajectory failed; `collected` names the step or the evaluation."""
        failed = self.counts.totals.trajectories_failed
        if failed == 0 or self.counts.totals.trajectories > 0:
            return None
        return RunFailed(f"every trajectory of {collected} failed, {failed} in all. The first: {self.first_failure}")

    def count(self, start: StartGroup, event: TrajectoryFinished | TrajectoryFailed, success: SuccessRule) -> None:
        self.counts = add_trajectory(self.counts, start, event, success)
        if isinstance(event, TrajectoryFinished):
            if isinstance(self.request, EvaluationRequested):
                self.other_version_tokens += count_other_versions(event, self.request.version)
        else:
            self.first_failure = self.first_failure or event.cause
            self.failures = dict(Counter(self.failures) + Counter([parse_failed_component(event.cause)]))

    def build_evaluation_finished(self, request: EvaluationRequested) -> EvaluationFinished:
        counts = self.counts
        return EvaluationFinished(
            label=request.label,
            version=request.version,
            totals=counts.totals,
            components=counts.components,
            tasks=counts.tasks,
            sets=counts.sets,
            other_version_tokens=self.other_version_tokens,
            first_group_id=self.first_group_id,
        )


class BufferState(msgspec.Struct):
    cursor: BufferCursor = BufferCursor()
    evaluation: GroupCollection | None = None
    steps: dict[int, GroupCollection] = {}  # by step, in order; only the last step may be unrequested
    aborting: dict[int, OpenGroup] = {}  # aborted groups with live trajectories
    lengths: dict[int, StepLengths] = {}  # by step
    pending_run_finished: RunFinished | None = None  # sent when the aborted groups have ended
    answered: frozenset[int] = frozenset()  # see RunStarted
    reported_failures: list[str] = []  # kinds of failures, at most MAX_REPORTED_FAILURES

    def find_open_group(self, group_id: int) -> OpenGroup | None:
        return next(
            (each.open_groups[group_id] for each in self.list_collections() if group_id in each.open_groups), None
        )

    def list_collections(self) -> list[GroupCollection]:
        return [*self.steps.values(), *([self.evaluation] if self.evaluation is not None else [])]

    def build_resume_cursor(self) -> BufferCursor:
        """Return the cursor. The groups of later steps are pending: a resumed run restarts them."""
        positions = (position for each in self.steps.values() for position in each.positions)
        return replace(self.cursor, pending=tuple(sorted({*self.cursor.pending, *positions})))


def report_first_failure(state: BufferState, event: TrajectoryFailed, group: OpenGroup | None) -> list[Send]:
    """Report the first failure of each kind. `group` is None if the step of the group has ended."""
    kind, known = classify_failure(event.cause), state.reported_failures
    if group is None or kind in known or len(known) >= MAX_REPORTED_FAILURES:
        return []
    known.append(kind)
    step, problem = group.started_for_step, group.start.problem
    return [Send(LAUNCHER, FailureReported(step, event.trajectory_id, problem, event.cause))]
