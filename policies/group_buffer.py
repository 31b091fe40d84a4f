"""The group buffer: starts groups, takes their trajectories in, and hands a step's batch to the learner.

A group whose trajectories all earn the same reward has no gradient: it is rejected, and another problem takes its
place, up to a stated number in a step. Trajectories that infrastructure lost are set apart: they are no answers, and a
group that keeps too few others is lost as a whole, counted and replaced as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from bus.messages import (
    AnyMessage,
    BatchReady,
    BufferCursor,
    EvaluationFinished,
    EvaluationRequested,
    ProtocolError,
    Row,
    RunStarted,
    StartGroup,
    StepCollected,
    StepCounts,
    StepRequested,
    TrajectoryFailed,
    TrajectoryFinished,
)
from configs.schema import Run
from policies.accounting import counted
from policies.advantages import group_advantages
from policies.curriculum import problem_at
from policies.decider import Send
from policies.draws import EVALUATE, TRAIN, mix
from policies.roc import resample


class Problem(msgspec.Struct, frozen=True, array_like=True):
    name: str
    ground_truth: str
    prompt_ids: bytes


class OpenGroup(msgspec.Struct):
    start: StartGroup
    finished: list[TrajectoryFinished] = []
    failed: list[int] = []  # ids of trajectories that infrastructure lost


class Collection(msgspec.Struct):
    """What is being collected: the groups of a step, or the trajectories of an evaluation."""

    request: StepRequested | EvaluationRequested
    open: dict[int, OpenGroup] = {}
    rows: dict[int, list[Row]] = {}  # of accepted groups
    refills: int = 0
    counts: StepCounts = StepCounts()
    failures: dict[str, int] = {}


class BufferState(msgspec.Struct):
    cursor: BufferCursor = BufferCursor()
    collection: Collection | None = None


class Totals(msgspec.Struct, frozen=True):
    cursor: BufferCursor
    num_open: int
    num_rows: int
    counts: StepCounts


def culprit(cause: str) -> str:
    """Which part of the infrastructure broke: what stands before the colon. The rest is in the event log."""
    return cause.partition(":")[0]


class GroupBuffer:
    """A decider (policies.decider.Decider). It deals groups to the rollout processes in turn."""

    def __init__(
        self, run: Run, train: Sequence[Problem], test: Sequence[Problem], rollouts: tuple[str, ...] = ("rollout-0",)
    ) -> None:
        self._run = run
        self._train = train
        self._test = test
        self._rollouts = rollouts
        self._observers = ("head/recorder", "head/recipe")  # what is recorded is recorded before the run goes on
        self.state = BufferState()

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        match event:
            case RunStarted(cursor=cursor):
                self.state = BufferState(cursor=cursor)
                return []
            case StepRequested():
                return self._begin_step(event)
            case EvaluationRequested():
                return self._begin_evaluation(event)
            case TrajectoryFinished() | TrajectoryFailed():
                return self._take(event)
            case _:
                raise ProtocolError(f"the group buffer has no use for {type(event).__name__}")

    def state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        collection = self.state.collection
        if collection is None:
            return self.state.cursor
        num_rows = sum(len(rows) for rows in collection.rows.values())
        return Totals(self.state.cursor, len(collection.open), num_rows, collection.counts)

    # ---------------------------------------------------------------- beginning

    def _begin_step(self, request: StepRequested) -> list[Send]:
        collection = self._begin(request)
        effects = [self._start_training_group(collection) for _ in range(self._run.rl.prompts)]
        return effects or self._end_step(collection, request)

    def _begin_evaluation(self, request: EvaluationRequested) -> list[Send]:
        collection = self._begin(request)
        effects: list[Send] = []
        for index, problem in enumerate(self._test[: request.questions]):
            seed = mix(self._run.seed, EVALUATE, index)
            effects.append(self._start_group(collection, problem, 1, request.temperature, seed))
        return effects or self._end_evaluation(collection, request)

    def _begin(self, request: StepRequested | EvaluationRequested) -> Collection:
        if self.state.collection is not None:
            raise ProtocolError(f"{type(request).__name__} before the last one was answered")
        self.state.collection = Collection(request=request)
        return self.state.collection

    def _start_training_group(self, collection: Collection) -> Send:
        position = self.state.cursor.position
        problem = self._train[problem_at(position, len(self._train), self._run.seed)]
        self.state.cursor = replace(self.state.cursor, position=position + 1)
        seed = mix(self._run.seed, TRAIN, position)
        return self._start_group(collection, problem, self._run.rl.rollouts, self._run.sampling.temperature, seed)

    def _start_group(self, collection: Collection, problem: Problem, size: int, temperature: float, seed: int) -> Send:
        cursor = self.state.cursor
        start = StartGroup(
            group_id=cursor.next_group_id,
            purpose="train" if isinstance(collection.request, StepRequested) else "evaluate",
            problem=problem.name,
            ground_truth=problem.ground_truth,
            prompt_ids=problem.prompt_ids,
            size=size,
            first_trajectory_id=cursor.next_trajectory_id,
            temperature=temperature,
            seed=seed,
        )
        self.state.cursor = replace(
            cursor, next_group_id=cursor.next_group_id + 1, next_trajectory_id=cursor.next_trajectory_id + size
        )
        collection.open[start.group_id] = OpenGroup(start)
        return Send(self._rollouts[start.group_id % len(self._rollouts)], start)

    # ---------------------------------------------------------------- taking in

    def _take(self, event: TrajectoryFinished | TrajectoryFailed) -> list[Send]:
        collection = self.state.collection
        group = collection.open.get(event.group_id) if collection is not None else None
        if collection is None or group is None:
            raise ProtocolError(f"trajectory {event.trajectory_id} belongs to no open group")
        ended = [*(trajectory.trajectory_id for trajectory in group.finished), *group.failed]
        if event.trajectory_id in ended:
            raise ProtocolError(f"trajectory {event.trajectory_id} ended twice")
        if isinstance(event, TrajectoryFinished):
            group.finished.append(event)
            collection.counts = counted(collection.counts, event)
        else:
            group.failed.append(event.trajectory_id)
            failed = collection.counts.trajectories_failed + 1
            collection.counts = replace(collection.counts, trajectories_failed=failed)
            collection.failures = dict(Counter(collection.failures) + Counter([culprit(event.cause)]))
        if len(ended) + 1 < group.start.size:
            return []
        return self._close_group(collection, group)

    def _close_group(self, collection: Collection, group: OpenGroup) -> list[Send]:
        del collection.open[group.start.group_id]
        request = collection.request
        if isinstance(request, EvaluationRequested):
            return [] if collection.open else self._end_evaluation(collection, request)
        effects = self._judge(collection, group)
        return effects if collection.open else [*effects, *self._end_step(collection, request)]

    def _judge(self, collection: Collection, group: OpenGroup) -> list[Send]:
        """Accept the group, or start another in its place."""
        counts = replace(collection.counts, groups=collection.counts.groups + 1)
        lost = len(group.finished) < self._keep or len(group.finished) < 2
        equal = len({trajectory.reward for trajectory in group.finished}) == 1
        if lost:
            counts = replace(counts, groups_lost=counts.groups_lost + 1)
        elif equal:
            counts = replace(counts, groups_rejected=counts.groups_rejected + 1)
        collection.counts = counts
        if not lost and not equal:
            collection.rows[group.start.group_id] = self._rows(group)
            return []
        if collection.refills >= self._run.rl.refills:
            return []
        collection.refills += 1
        return [self._start_training_group(collection)]

    @property
    def _keep(self) -> int:
        """Trajectories of a group that are trained on: G, half of what is rolled out; all of them in plain GRPO."""
        return self._run.rl.rollouts // 2 if self._run.roc.enabled else 2

    def _rows(self, group: OpenGroup) -> list[Row]:
        finished = sorted(group.finished, key=lambda trajectory: trajectory.trajectory_id)
        if self._run.roc.enabled:
            finished = resample(finished, self._keep, self._run.roc, group.start.seed)
        advantages = group_advantages([trajectory.reward for trajectory in finished])
        return [
            Row(
                trajectory_id=trajectory.trajectory_id,
                group_id=trajectory.group_id,
                advantage=advantage,
                prompt_tokens=trajectory.prompt_tokens,
                token_ids=trajectory.token_ids,
                loss_mask=trajectory.loss_mask,
                logprobs=trajectory.logprobs,
                versions=trajectory.versions,
            )
            for trajectory, advantage in zip(finished, advantages, strict=True)
        ]

    # ---------------------------------------------------------------- ending

    def _end_step(self, collection: Collection, request: StepRequested) -> list[Send]:
        """Rows go in the order of their ids, so that a batch does not depend on who was faster."""
        rows = tuple(row for group_id in sorted(collection.rows) for row in collection.rows[group_id])
        collected = StepCollected(request.step, len(rows), collection.counts, collection.failures, self.state.cursor)
        self.state.collection = None
        batch = Send("learner", BatchReady(request.step, rows))
        return [batch, *(Send(observer, collected) for observer in self._observers)]

    def _end_evaluation(self, collection: Collection, request: EvaluationRequested) -> list[Send]:
        counts = collection.counts
        finished = EvaluationFinished(
            label=request.label,
            questions=counts.trajectories + counts.trajectories_failed,
            correct=counts.correct,
            failed=counts.trajectories_failed,
            response_tokens=counts.response_tokens,
        )
        self.state.collection = None
        return [Send(observer, finished) for observer in self._observers]
