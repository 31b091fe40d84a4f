"""What the group buffer keeps: groups that are open, the collections that they count for, and the lengths of all that a
step began."""

from __future__ import annotations

from collections import Counter

import msgspec
from msgspec.structs import replace

from bus.messages import (
    BufferCursor,
    EvaluationRequested,
    GroupAborted,
    LengthCounts,
    LengthsMeasured,
    Row,
    RunFinished,
    StalenessCounts,
    StartGroup,
    StepCounts,
    StepRequested,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
)
from policies.accounting import counted, lengths_with

STEP_ENDED = "the step ended without it"

TrajectoryEnd = TrajectoryFinished | TrajectoryFailed | TrajectoryAborted


def culprit(cause: str) -> str:
    """Which part of the infrastructure broke: what stands before the colon. The rest is in the event log."""
    return cause.partition(":")[0]


class OpenGroup(msgspec.Struct):
    start: StartGroup
    begun_for: int  # the step that it was started for; 0: an evaluation
    rollout: str  # where it lives
    position: int  # of its problem in the sequence
    finished: list[TrajectoryFinished] = []
    failed: list[int] = []  # ids of trajectories that infrastructure lost
    aborted: list[int] = []

    def has_ended(self, trajectory_id: int) -> bool:
        finished = (trajectory.trajectory_id for trajectory in self.finished)
        return trajectory_id in self.failed or trajectory_id in self.aborted or trajectory_id in finished

    @property
    def is_complete(self) -> bool:
        return len(self.finished) + len(self.failed) + len(self.aborted) == self.start.size

    def take(self, event: TrajectoryEnd) -> None:
        match event:
            case TrajectoryFinished():
                self.finished.append(event)
            case TrajectoryFailed(trajectory_id=trajectory_id):
                self.failed.append(trajectory_id)
            case TrajectoryAborted(trajectory_id=trajectory_id):
                self.aborted.append(trajectory_id)

    def abort(self) -> GroupAborted:
        start = self.start
        return GroupAborted(start.group_id, start.first_trajectory_id, start.size, STEP_ENDED)


class Collection(msgspec.Struct):
    """What is being collected: the groups of a step, or the trajectories of an evaluation."""

    step: int  # 0: an evaluation
    request: StepRequested | EvaluationRequested | None = None  # None: it only holds what the step before left over
    open: dict[int, OpenGroup] = {}
    rows: dict[int, list[Row]] = {}  # of accepted groups
    places: int = 0  # groups that it was started with or left; a refill takes the place of another
    positions: list[int] = []  # of all groups that it was started with or left
    refills: int = 0
    counts: StepCounts = StepCounts()
    failures: dict[str, int] = {}
    staleness: StalenessCounts = StalenessCounts()
    is_complete: bool = False  # it waits for the steps before it

    def count(self, event: TrajectoryFinished | TrajectoryFailed) -> None:
        if isinstance(event, TrajectoryFinished):
            self.counts = counted(self.counts, event)
        else:
            self.counts = replace(self.counts, trajectories_failed=self.counts.trajectories_failed + 1)
            self.failures = dict(Counter(self.failures) + Counter([culprit(event.cause)]))


class Lengths(msgspec.Struct):
    """Of the groups that one step began, until all of their trajectories have ended."""

    open_groups: int = 0
    step_ended: bool = False
    taken: LengthCounts = LengthCounts()
    started: LengthCounts = LengthCounts()
    aborted: int = 0
    late: int = 0

    def ended(self, event: TrajectoryEnd, *, late: bool) -> None:
        self.late += late and not isinstance(event, TrajectoryAborted)
        if isinstance(event, TrajectoryFinished):
            self.started = lengths_with(self.started, event)
        elif isinstance(event, TrajectoryAborted):
            self.aborted += 1
            so_far = self.started.response_tokens + event.response_tokens
            self.started = replace(self.started, trajectories=self.started.trajectories + 1, response_tokens=so_far)

    def take(self, group: OpenGroup) -> None:
        for trajectory in group.finished:
            self.taken = lengths_with(self.taken, trajectory)

    def measured(self, step: int) -> LengthsMeasured:
        return LengthsMeasured(step, self.taken, self.started, self.aborted, self.late)


class BufferState(msgspec.Struct):
    cursor: BufferCursor = BufferCursor()
    evaluation: Collection | None = None
    steps: dict[int, Collection] = {}  # in their order; at most the last one is not requested yet
    stopping: dict[int, OpenGroup] = {}  # aborted groups of which trajectories live
    lengths: dict[int, Lengths] = {}  # by step
    finished: RunFinished | None = None  # the run's word of its end, while trajectories are being stopped
