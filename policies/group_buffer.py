"""The group buffer: starts groups, takes their trajectories in, and hands each step's batch to the learner.

A group whose trajectories all earn the same reward has no gradient: it is rejected, and another problem takes its
place, up to a stated number in a step. Trajectories that infrastructure lost are set apart: they are no answers, and a
group that keeps too few others is lost as a whole, counted and replaced as well.

Several steps may be collected at once (`rl.max_staleness`), each from the groups that were started for it; their batches
go out in the order of the steps. A step may start more groups than it needs (`rl.oversubscribe`); it ends with the first
complete ones, and the others count for the next step or are stopped. docs/staleness.md states the rules.
"""

from __future__ import annotations

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
    RunFinished,
    RunStarted,
    StartGroup,
    StepCollected,
    StepCounts,
    StepRequested,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
)
from configs.schema import Run
from policies.collection import BufferState, Collection, Lengths, OpenGroup, TrajectoryEnd
from policies.curriculum import problem_at
from policies.decider import Send
from policies.draws import EVALUATE, TRAIN, mix
from policies.filtering import kept_of, rows_of, verdict_on, young_of
from policies.staleness import tokens_masked, with_rows


class Problem(msgspec.Struct, frozen=True, array_like=True):
    name: str
    ground_truth: str
    prompt_ids: bytes


class Totals(msgspec.Struct, frozen=True):
    cursor: BufferCursor
    num_open: int
    num_stopping: int
    num_rows: int
    counts: StepCounts  # of the earliest collection


class GroupBuffer:
    """A decider (policies.decider.Decider). It deals groups to the rollout processes in turn."""

    def __init__(
        self, run: Run, train: Sequence[Problem], test: Sequence[Problem], rollouts: tuple[str, ...] = ("rollout-0",)
    ) -> None:
        self._run = run
        self._train = train
        self._test = test
        self._rollouts = rollouts
        self._recorder = "head/recorder"
        self._observers = (self._recorder, "head/recipe")  # what is recorded is recorded before the run goes on
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
            case TrajectoryFinished() | TrajectoryFailed() | TrajectoryAborted():
                return self._take(event)
            case RunFinished():
                self.state.finished = event
                return self._end_run()
            case _:
                raise ProtocolError(f"the group buffer has no use for {type(event).__name__}")

    def state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        collections = self._collections()
        if not collections and not self.state.stopping:
            return self.state.cursor
        return Totals(
            cursor=self.state.cursor,
            num_open=sum(len(each.open) for each in collections),
            num_stopping=len(self.state.stopping),
            num_rows=sum(len(rows) for each in collections for rows in each.rows.values()),
            counts=collections[0].counts if collections else StepCounts(),
        )

    def _collections(self) -> list[Collection]:
        evaluation = self.state.evaluation
        return [*self.state.steps.values(), *([evaluation] if evaluation is not None else [])]

    # ---------------------------------------------------------------- beginning

    def _begin_step(self, request: StepRequested) -> list[Send]:
        collection = self.state.steps[request.step] = self._next_step(request)
        collection.request = request
        self.state.lengths[request.step] = Lengths()
        effects = [self._start_training_group(collection) for _ in range(self._groups_to_start())]
        collection.places += len(effects)
        for group in [group for group in collection.open.values() if group.is_complete]:
            if group.start.group_id in collection.open:  # it was left over, and ended before this request
                effects += self._close(collection, group)
        return effects

    def _next_step(self, request: StepRequested) -> Collection:
        """Empty, or with what the step before left over."""
        steps = list(self.state.steps.values())
        requested = sum(each.request is not None for each in steps)
        if self.state.evaluation is not None or requested > self._run.rl.max_staleness:
            raise ProtocolError("StepRequested before the last one was answered")
        if not steps:
            return Collection(request.step)
        begun = steps[-1].request is None
        if request.step != steps[-1].step + (not begun):
            raise ProtocolError(f"step {request.step} does not follow step {steps[-1].step}")
        return steps[-1] if begun else Collection(request.step)

    def _groups_to_start(self) -> int:
        """Where what is left over is carried, the steps that are under way have their spare groups in common."""
        rl = self._run.rl
        if rl.leftovers == "abort":
            return rl.groups
        steps = self.state.steps.values()
        return max(0, len(steps) * rl.prompts + rl.groups - rl.prompts - sum(each.places for each in steps))

    def _begin_evaluation(self, request: EvaluationRequested) -> list[Send]:
        if self._collections():
            raise ProtocolError("EvaluationRequested before the last one was answered")
        collection = self.state.evaluation = Collection(0, request)
        effects: list[Send] = []
        for index, problem in enumerate(self._test[: request.questions]):
            seed = mix(self._run.seed, EVALUATE, index)
            effects.append(self._start_group(collection, problem, index, 1, request.temperature, seed))
        return effects or self._end_evaluation(collection, request)

    def _start_training_group(self, collection: Collection) -> Send:
        position = self._next_position()
        collection.positions.append(position)
        self.state.lengths[collection.step].open_groups += 1
        problem = self._train[problem_at(position, len(self._train), self._run.seed)]
        seed = mix(self._run.seed, TRAIN, position)
        size, temperature = self._run.rl.rollouts, self._run.sampling.temperature
        return self._start_group(collection, problem, position, size, temperature, seed)

    def _next_position(self) -> int:
        cursor = self.state.cursor
        if cursor.pending:
            self.state.cursor = replace(cursor, pending=cursor.pending[1:])
            return cursor.pending[0]
        self.state.cursor = replace(cursor, position=cursor.position + 1)
        return cursor.position

    def _start_group(
        self, collection: Collection, problem: Problem, position: int, size: int, temperature: float, seed: int
    ) -> Send:
        cursor = self.state.cursor
        start = StartGroup(
            group_id=cursor.next_group_id,
            purpose="train" if collection.step else "evaluate",
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
        rollout = self._rollouts[start.group_id % len(self._rollouts)]
        collection.open[start.group_id] = OpenGroup(start, collection.step, rollout, position)
        return Send(rollout, start)

    # ---------------------------------------------------------------- taking in

    def _take(self, event: TrajectoryEnd) -> list[Send]:
        collection = next((each for each in self._collections() if event.group_id in each.open), None)
        groups = self.state.stopping if collection is None else collection.open
        group = groups.get(event.group_id)
        if group is None:
            raise ProtocolError(f"trajectory {event.trajectory_id} belongs to no open group")
        if group.has_ended(event.trajectory_id):
            raise ProtocolError(f"trajectory {event.trajectory_id} ended twice")
        if isinstance(event, TrajectoryAborted):
            if collection is not None:
                raise ProtocolError(f"trajectory {event.trajectory_id} was stopped, and nobody asked for it")
        elif collection is not None:
            collection.count(event)
        group.take(event)
        self._note_length(group, event, late=collection is None)
        if not group.is_complete:
            return []
        if collection is None:
            del self.state.stopping[event.group_id]
            return [*self._lengths_if_known(group.begun_for), *self._end_run()]
        return [*self._close(collection, group), *self._lengths_if_known(group.begun_for)]

    def _close(self, collection: Collection, group: OpenGroup) -> list[Send]:
        """All trajectories of the group have ended."""
        request = collection.request
        if request is None:
            return []  # it is judged when the step that it counts for is requested
        del collection.open[group.start.group_id]
        if isinstance(request, EvaluationRequested):
            return [] if collection.open else self._end_evaluation(collection, request)
        if collection.step == group.begun_for:
            self.state.lengths[collection.step].take(group)
        return [*self._judge(collection, group), *self._end_steps(collection)]

    def _judge(self, collection: Collection, group: OpenGroup) -> list[Send]:
        """Accept the group, or start another in its place."""
        young = young_of(group.finished, collection.step, self._run.rl)
        dropped = collection.staleness.trajectories_dropped + len(group.finished) - len(young)
        collection.staleness = replace(collection.staleness, trajectories_dropped=dropped)
        verdict = verdict_on(young, kept_of(self._run))
        counts = collection.counts
        collection.counts = replace(
            counts,
            groups=counts.groups + 1,
            groups_lost=counts.groups_lost + (verdict == "lost"),
            groups_rejected=counts.groups_rejected + (verdict == "equal"),
        )
        if verdict == "accepted":
            self._accept(collection, group, young)
            return []
        if collection.refills >= self._run.rl.refills:
            return []
        collection.refills += 1
        return [self._start_training_group(collection)]

    def _accept(self, collection: Collection, group: OpenGroup, young: list[TrajectoryFinished]) -> None:
        rows = rows_of(young, kept_of(self._run), self._run.roc, group.start.seed)
        collection.rows[group.start.group_id] = rows
        if not self._run.rl.max_staleness:
            return
        whole = {trajectory.trajectory_id: trajectory for trajectory in group.finished}
        masked = sum(tokens_masked(whole[row.trajectory_id], row) for row in rows)
        staleness = with_rows(collection.staleness, rows, collection.step - 1)
        collection.staleness = replace(staleness, tokens_masked=staleness.tokens_masked + masked)

    # ---------------------------------------------------------------- ending

    def _end_steps(self, collection: Collection) -> list[Send]:
        """The collection's step is complete with enough groups, or with all that there are. Its batch goes out after
        those of the steps before it."""
        enough = len(collection.rows) >= self._run.rl.prompts
        if collection.is_complete or (collection.open and not enough):
            return []
        collection.is_complete = True
        effects = self._leave_over(collection)
        collection.places = self._run.rl.prompts
        self.state.lengths[collection.step].step_ended = True
        effects += self._lengths_if_known(collection.step)
        for step in list(self.state.steps):
            if not self.state.steps[step].is_complete:
                break
            effects += self._end_step(self.state.steps.pop(step))
        return effects

    def _end_run(self) -> list[Send]:
        """When it is finished, and every trajectory that was to be stopped has ended: each that starts ends once."""
        finished = self.state.finished
        if finished is None or self.state.stopping:
            return []
        self.state.finished = None
        return [Send("launcher", finished)]

    def _leave_over(self, collection: Collection) -> list[Send]:
        """What is still open: it counts for the next step, or is stopped. Nothing is left for a step that never comes."""
        left, collection.open = collection.open, {}
        following = [step for step, each in self.state.steps.items() if step > collection.step and not each.is_complete]
        step = following[0] if following else next(reversed(self.state.steps)) + 1
        if left and self._run.rl.leftovers == "carry" and step <= self._run.rl.steps:
            heir = self.state.steps.setdefault(step, Collection(step))
            heir.open.update(left)
            heir.places += len(left)
            heir.positions += [group.position for group in left.values()]
            return []
        living = {group_id: group for group_id, group in left.items() if not group.is_complete}
        self.state.stopping.update(living)
        return [Send(group.rollout, group.abort()) for group in living.values()]

    def _end_step(self, collection: Collection) -> list[Send]:
        """Rows go in the order of their ids, so that a batch does not depend on who was faster."""
        rows = tuple(row for group_id in sorted(collection.rows) for row in collection.rows[group_id])
        staleness = collection.staleness if self._run.rl.max_staleness else None
        collected = StepCollected(
            collection.step, len(rows), collection.counts, collection.failures, self._cursor(), staleness
        )
        batch = Send("learner", BatchReady(collection.step, rows))
        return [batch, *(Send(observer, collected) for observer in self._observers)]

    def _cursor(self) -> BufferCursor:
        """Whoever goes on from here has none of the groups that are under way for later steps: they begin anew."""
        cursor = self.state.cursor
        positions = (position for each in self.state.steps.values() for position in each.positions)
        return replace(cursor, pending=tuple(sorted({*cursor.pending, *positions})))

    def _end_evaluation(self, collection: Collection, request: EvaluationRequested) -> list[Send]:
        counts = collection.counts
        finished = EvaluationFinished(
            label=request.label,
            questions=counts.trajectories + counts.trajectories_failed,
            correct=counts.correct,
            failed=counts.trajectories_failed,
            response_tokens=counts.response_tokens,
        )
        self.state.evaluation = None
        return [Send(observer, finished) for observer in self._observers]

    # ---------------------------------------------------------------- lengths

    def _note_length(self, group: OpenGroup, event: TrajectoryEnd, *, late: bool) -> None:
        if not group.begun_for:
            return
        lengths = self.state.lengths[group.begun_for]
        lengths.ended(event, late=late)
        lengths.open_groups -= group.is_complete

    def _lengths_if_known(self, step: int) -> list[Send]:
        """Once the step has ended and so have all groups that it began; of interest where it began more than it needs."""
        lengths = self.state.lengths.get(step)
        if lengths is None or not lengths.step_ended or lengths.open_groups:
            return []
        del self.state.lengths[step]
        if self._run.rl.groups == self._run.rl.prompts:
            return []
        return [Send(self._recorder, lengths.measured(step))]
