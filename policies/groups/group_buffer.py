"""The group buffer: starts groups, collects their trajectories, and sends accepted groups to the learner.

The buffer sends the trajectories of a group as soon as it accepts the group; the step's batch then only lists its
groups. The buffer rejects a group without a gradient, such as a group with equal rewards, and replaces it by a
group on another problem, up to `rl.max_refill_groups` times in a step. Trajectories lost to infrastructure failures are
not answers. A group with too few answers is counted as lost, and also replaced.

Several steps may be collected at the same time (`rl.max_staleness`), each from the groups started
for it; batches are sent in the order of the steps. A step may start more groups than it needs
(`rl.group_oversampling`); it ends with its first complete groups, and carries the other groups to
the next step or aborts them. docs/staleness.md states the rules.
"""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from asterism.bus.addresses import LAUNCHER, LEARNER, RECIPE, RECORDER, ROLLOUT
from asterism.bus.messages import (
    AnyMessage,
    BatchGroup,
    BatchReady,
    BufferCursor,
    EvaluationRequested,
    ProtocolError,
    RunFinished,
    RunStarted,
    StepCollected,
    StepCounts,
    StepRequested,
    TrainingSample,
    TrajectoryAborted,
    TrajectoryEnd,
    TrajectoryFailed,
    TrajectoryFinished,
)
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.decider import Send
from asterism.policies.groups.buffer_state import (
    AcceptedGroup,
    BufferState,
    GroupCollection,
    OpenGroup,
    report_first_failure,
)
from asterism.policies.groups.counts import StepLengths, add_group_selection
from asterism.policies.groups.group_starter import GroupStarter, ProblemSet
from asterism.policies.groups.selection import (
    SelectionRules,
    describe_judgement,
    select_fresh_trajectories,
    select_rows,
    split_accepted_group,
)
from asterism.policies.groups.staleness import add_staleness, count_masked_tokens


class BufferStateSummary(msgspec.Struct, frozen=True):
    cursor: BufferCursor
    num_open: int
    num_aborting: int
    num_rows: int
    counts: StepCounts  # counts of the earliest collection


class GroupBuffer:
    """A decider (asterism.policies.decider.Decider)."""

    def __init__(
        self,
        run: RunConfig,
        train: ProblemSet,
        test: ProblemSet,
        rollout_addresses: tuple[str, ...] = (ROLLOUT,),
    ) -> None:
        self._rl, self._success = run.rl, run.success
        self._selection_rules = SelectionRules.from_config(run)
        self._starter = GroupStarter(run, train, test, rollout_addresses)
        self._observers = (RECORDER, RECIPE)  # in this order, because the recipe continues the run
        self.state = BufferState()

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        match event:
            case RunStarted(cursor=cursor, answered=answered):
                self.state = BufferState(cursor=cursor, answered=frozenset(answered))
                return []
            case StepRequested():
                return self._start_step(event)
            case EvaluationRequested():
                return self._start_evaluation(event)
            case TrajectoryFailed():
                group = self.state.find_open_group(event.group_id)
                effects = self._on_trajectory_ended(event)
                return [*report_first_failure(self.state, event, group), *effects]
            case TrajectoryFinished() | TrajectoryAborted():
                return self._on_trajectory_ended(event)
            case RunFinished():
                self.state.pending_run_finished = event
                return self._finish_run_if_drained()
            case _:
                raise ProtocolError(f"the group buffer does not accept {type(event).__name__}")

    def get_state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        collections = self.state.list_collections()
        if not collections and not self.state.aborting:
            return self.state.cursor
        return BufferStateSummary(
            cursor=self.state.cursor,
            num_open=sum(len(each.open_groups) for each in collections),
            num_aborting=len(self.state.aborting),
            num_rows=sum(group.num_rows for each in collections for group in each.accepted.values()),
            counts=collections[0].counts if collections else StepCounts(),
        )

    # ---------------------------------------------------------------- starting

    def _start_step(self, request: StepRequested) -> list[Send]:
        collection = self.state.steps[request.step] = self._get_or_create_collection(request)
        collection.request = request
        self.state.lengths[request.step] = StepLengths()
        effects = [self._start_training_group(collection) for _ in range(self._count_groups_to_start())]
        collection.num_planned_groups += len(effects)
        for group in [group for group in collection.open_groups.values() if group.is_complete]:
            if group.start.group_id in collection.open_groups:  # the end of one carried group can close others
                effects += self._close_group(collection, group)
        return effects

    def _get_or_create_collection(self, request: StepRequested) -> GroupCollection:
        """Return an empty collection, or the collection of groups carried over from the previous step."""
        steps = list(self.state.steps.values())
        requested = sum(each.request is not None for each in steps)
        if requested > self._rl.max_staleness:
            raise ProtocolError("StepRequested while earlier steps are still being collected")
        if not steps:
            return GroupCollection(request.step)
        has_carried_groups = steps[-1].request is None
        if request.step != steps[-1].step + (not has_carried_groups):
            raise ProtocolError(f"step {request.step} does not follow step {steps[-1].step}")
        return steps[-1] if has_carried_groups else GroupCollection(request.step)

    def _count_groups_to_start(self) -> int:
        """Return the number of groups. With carried groups, all steps in flight share the spare groups of one step."""
        rl = self._rl
        if rl.surplus_groups == "abort":
            return rl.started_groups
        steps = self.state.steps.values()
        num_spare = rl.started_groups - rl.prompts
        return max(0, len(steps) * rl.prompts + num_spare - sum(each.num_planned_groups for each in steps))

    def _start_evaluation(self, request: EvaluationRequested) -> list[Send]:
        """Start the answers of an evaluation, possibly while steps are being collected."""
        if self.state.evaluation is not None:
            raise ProtocolError("EvaluationRequested while an evaluation is still being collected")
        first_group_id = self.state.cursor.next_group_id
        collection = self.state.evaluation = GroupCollection(0, request, first_group_id=first_group_id)
        effects: list[Send] = []
        for answer in self._starter.questions.list_answers(request, self.state.answered):
            self.state.cursor, group = self._starter.start_answer(self.state.cursor, answer, request)
            effects.append(self._open_group(collection, group))
        return effects or self._end_evaluation(collection, request)

    def _start_training_group(self, collection: GroupCollection) -> Send:
        self.state.cursor, group = self._starter.start_training_group(self.state.cursor, collection.step)
        collection.positions.append(group.position)
        self.state.lengths[collection.step].num_open_groups += 1
        return self._open_group(collection, group)

    def _open_group(self, collection: GroupCollection, group: OpenGroup) -> Send:
        collection.open_groups[group.start.group_id] = group
        return Send(group.rollout_address, group.start)

    # ---------------------------------------------------------------- collecting

    def _on_trajectory_ended(self, event: TrajectoryEnd) -> list[Send]:
        collection = next((each for each in self.state.list_collections() if event.group_id in each.open_groups), None)
        groups = self.state.aborting if collection is None else collection.open_groups
        group = groups.get(event.group_id)
        if group is None:
            raise ProtocolError(f"trajectory {event.trajectory_id} belongs to no open group")
        if group.has_ended(event.trajectory_id):
            raise ProtocolError(f"trajectory {event.trajectory_id} ended twice")
        if isinstance(event, TrajectoryAborted):
            if collection is not None:
                raise ProtocolError(f"trajectory {event.trajectory_id} was aborted without a request")
        elif collection is not None:
            collection.count(group.start, event, self._success)
        group.record_end(event)
        self._record_length(group, event, late=collection is None)
        if not group.is_complete:
            return []
        if collection is None:
            del self.state.aborting[event.group_id]
            return [*self._report_lengths_if_complete(group.started_for_step), *self._finish_run_if_drained()]
        return [*self._close_group(collection, group), *self._report_lengths_if_complete(group.started_for_step)]

    def _close_group(self, collection: GroupCollection, group: OpenGroup) -> list[Send]:
        """Close a group after the end of its last trajectory, and judge a training group."""
        request = collection.request
        if request is None:
            return []  # the group is judged when its new step is requested
        del collection.open_groups[group.start.group_id]
        if isinstance(request, EvaluationRequested):
            return [] if collection.open_groups else self._end_evaluation(collection, request)
        if collection.step == group.started_for_step:
            self.state.lengths[collection.step].add_taken_group(group.finished)
        return [*self._judge_group(collection, group), *self._end_complete_steps(collection)]

    def _judge_group(self, collection: GroupCollection, group: OpenGroup) -> list[Send]:
        """Accept the group, or start a replacement."""
        fresh = select_fresh_trajectories(group.finished, collection.step, self._rl)
        dropped = collection.staleness.trajectories_dropped + len(group.finished) - len(fresh)
        collection.staleness = replace(collection.staleness, trajectories_dropped=dropped)
        start = group.start
        selection = select_rows(self._selection_rules, fresh, start.seed, start.task)
        collection.counts = add_group_selection(collection.counts, start, selection)
        effects = [Send(RECORDER, describe_judgement(collection.step, start, fresh, selection))]
        if selection.verdict == "accepted":
            effects += self._send_rows(collection, group, selection.rows)
        if selection.verdict != "accepted" and collection.num_refills < self._rl.max_refill_groups:
            collection.num_refills += 1
            effects.append(self._start_training_group(collection))
        return effects

    def _send_rows(self, collection: GroupCollection, group: OpenGroup, rows: list[TrainingSample]) -> list[Send]:
        parts = split_accepted_group(collection.step, group.start.group_id, rows)
        collection.accepted[group.start.group_id] = AcceptedGroup(len(rows), len(parts))
        if self._rl.max_staleness:
            unmasked = {trajectory.trajectory_id: trajectory for trajectory in group.finished}
            masked = sum(count_masked_tokens(unmasked[row.trajectory_id], row) for row in rows)
            staleness = add_staleness(collection.staleness, rows, collection.step - 1)
            collection.staleness = replace(staleness, tokens_masked=staleness.tokens_masked + masked)
        return [Send(LEARNER, part) for part in parts]

    # ---------------------------------------------------------------- ending

    def _end_complete_steps(self, collection: GroupCollection) -> list[Send]:
        """End steps with enough accepted groups or without open groups. Batches keep the order of the steps."""
        enough = len(collection.accepted) >= self._rl.prompts
        if collection.is_complete or (collection.open_groups and not enough):
            return []
        collection.is_complete = True
        effects = self._carry_or_abort_open_groups(collection)
        collection.num_planned_groups = self._rl.prompts
        self.state.lengths[collection.step].step_ended = True
        effects += self._report_lengths_if_complete(collection.step)
        for step in list(self.state.steps):
            if not self.state.steps[step].is_complete:
                break
            effects += self._end_step(self.state.steps.pop(step))
        return effects

    def _finish_run_if_drained(self) -> list[Send]:
        """Finish the run after the end of the last aborted trajectory."""
        finished = self.state.pending_run_finished
        if finished is None or self.state.aborting:
            return []
        self.state.pending_run_finished = None
        return [Send(LAUNCHER, finished)]

    def _carry_or_abort_open_groups(self, collection: GroupCollection) -> list[Send]:
        """Carry open groups to the next step or abort them; after the last step, always abort them."""
        surplus, collection.open_groups = collection.open_groups, {}
        following = [step for step, each in self.state.steps.items() if step > collection.step and not each.is_complete]
        step = following[0] if following else next(reversed(self.state.steps)) + 1
        is_last = collection.is_last or step > self._rl.steps
        if surplus and self._rl.surplus_groups == "carry" and not is_last:
            next_collection = self.state.steps.setdefault(step, GroupCollection(step))
            next_collection.open_groups.update(surplus)
            next_collection.num_planned_groups += len(surplus)
            next_collection.positions += [group.position for group in surplus.values()]
            return []
        unfinished = {group_id: group for group_id, group in surplus.items() if not group.is_complete}
        self.state.aborting.update(unfinished)
        return [Send(group.rollout_address, group.build_abort_message()) for group in unfinished.values()]

    def _end_step(self, collection: GroupCollection) -> list[Send]:
        """Send the batch and the counts. Sorted groups make a batch independent of completion order."""
        groups = tuple(BatchGroup(group_id, each.num_parts) for group_id, each in sorted(collection.accepted.items()))
        num_rows = sum(each.num_rows for each in collection.accepted.values())
        staleness = collection.staleness if self._rl.max_staleness else None
        cursor = self.state.build_resume_cursor()
        collected = StepCollected(collection.step, num_rows, collection.counts, collection.failures, cursor, staleness)
        if failed := collection.find_total_failure(f"step {collection.step}"):
            return [Send(RECORDER, collected), Send(LAUNCHER, failed)]
        batch = Send(LEARNER, BatchReady(collection.step, groups, collection.is_last))
        return [batch, *(Send(observer, collected) for observer in self._observers)]

    def _end_evaluation(self, collection: GroupCollection, request: EvaluationRequested) -> list[Send]:
        finished = collection.build_evaluation_finished(request)
        self.state.evaluation = None
        is_resumed = bool(self.state.answered)  # an earlier launch has answered some questions
        if not is_resumed and (failed := collection.find_total_failure(f"evaluation {request.label}")):
            return [Send(RECORDER, finished), Send(LAUNCHER, failed)]
        return [Send(observer, finished) for observer in self._observers]

    # ---------------------------------------------------------------- lengths

    def _record_length(self, group: OpenGroup, event: TrajectoryEnd, *, late: bool) -> None:
        if group.started_for_step:
            lengths = self.state.lengths[group.started_for_step]
            lengths.on_trajectory_ended(event, late=late)
            lengths.num_open_groups -= group.is_complete

    def _report_lengths_if_complete(self, step: int) -> list[Send]:
        """Report the lengths of a step that started more groups than it needs, after the end of all its groups."""
        lengths = self.state.lengths.get(step)
        if lengths is None or not lengths.is_complete:
            return []
        del self.state.lengths[step]
        if self._rl.started_groups == self._rl.prompts:
            return []
        return [Send(RECORDER, lengths.to_message(step))]
