"""The decider of a rollout process: routes events to trajectories, and calls to executors.

Without an executor, trajectories with calls wait. When an executor leaves, other executors receive
its open calls again. Answers from an executor that is not assigned to the trajectory are dropped as
late.

When an engine leaves, its in-flight turns fail. Their trajectories request a new lease, and so
does any trajectory that is later granted a lease on that engine. Incarnation numbers keep a late
EngineLeft from affecting the next incarnation.

A lease that is in flight to an aborted trajectory is dropped as late.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import msgspec
from msgspec.structs import replace

from asterism.bus.messages import (
    AnswerSubmitted,
    AnyMessage,
    CallFailed,
    CallsRescheduled,
    CodeRequested,
    EngineLeft,
    EnvironmentCalled,
    ExecutorJoined,
    ExecutorLeft,
    GroupAborted,
    LeaseDeferred,
    LeaseGranted,
    ProtocolError,
    RunStarted,
    StartGroup,
    TurnFailed,
)
from asterism.configs.errors import UnusableInput
from asterism.policies.decider import Send
from asterism.policies.rollout.call_transitions import build_pending_requests
from asterism.policies.rollout.endings import EXECUTOR, Transition
from asterism.policies.rollout.executor_placement import ExecutorOccupancy, ExecutorPlacement
from asterism.policies.rollout.rollout_policy import IndependentTrajectories, RolloutPolicy, list_siblings
from asterism.policies.rollout.trajectory import CallAnswer, Phase, Rules, Trajectory, TrajectoryEvent
from asterism.policies.rollout.transitions import abort, adopt, decline_lease

# Newest ids to keep of trajectories that were aborted while they waited for a lease.
MAX_ABORTED_WHILE_LEASING = 65_536
_TRAJECTORY_EVENTS: tuple[type, ...] = get_args(TrajectoryEvent)


class PlacementSummary(msgspec.Struct, frozen=True):
    """The part of the state that is fingerprinted after an executor has joined or left."""

    loads: dict[str, ExecutorOccupancy]
    waiting: tuple[int, ...]


class Rollout:
    """A decider (asterism.policies.decider.Decider). Trajectories share only the rules, the policy and the executors.

    `rules`: the rules by task name. The decider calls `make_policy` at the start of the run.
    """

    def __init__(
        self, rules: Mapping[str, Rules], make_policy: Callable[[], RolloutPolicy] = IndependentTrajectories
    ) -> None:
        self._make_policy = make_policy
        self._rules = {"train": rules, "evaluate": {task: each.of_evaluations for task, each in rules.items()}}
        self._launcher = next(iter(rules.values())).launcher
        self._reset()

    def _reset(self) -> None:
        self._policy = self._make_policy()
        self.trajectories: dict[int, Trajectory] = {}  # live trajectories
        self.num_by_phase = Counter[Phase]()  # live trajectories
        self.num_generating = Counter[str]()  # generating trajectories, by engine
        self.ended: dict[int, Trajectory] = {}  # trajectories that the last decision ended
        self.placement = ExecutorPlacement()
        # Trajectories with open calls and without an executor, in order.
        self.waiting_for_executor: dict[int, None] = {}
        self._departed_engines: dict[str, int] = {}  # newest departed incarnation of each engine
        self._next_trajectory_id = 0  # larger than every id of a started trajectory
        self._aborted_while_leasing: dict[int, None] = {}
        self._last_changed: Trajectory | None = None

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        self.ended.clear()
        match event:
            case RunStarted():
                self._reset()
                return []
            case StartGroup():
                return self._start_group(now, event)
            case GroupAborted():
                return self._abort_group(now, event)
            case ExecutorJoined():
                return self._on_executor_joined(event)
            case ExecutorLeft():
                return self._on_executor_left(now, event)
            case EngineLeft():
                return self._on_engine_left(now, event)
            case _ if isinstance(event, _TRAJECTORY_EVENTS):
                return self._on_trajectory_event(now, event)  # pyright: ignore[reportArgumentType] - narrowed by the tuple
            case _:
                raise ProtocolError(f"a rollout process does not accept {type(event).__name__}")

    def get_state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        """Return the trajectory that the event changed, or the placement after an executor's event."""
        if isinstance(event, ExecutorJoined | ExecutorLeft):
            return PlacementSummary(self.placement.loads, tuple(self.waiting_for_executor))
        return self._last_changed

    def adopt(self, now: float, trajectory: Trajectory) -> list[Send]:
        """Continue a trajectory from another process, at the start of a turn."""
        adopted, effects = adopt(self._get_rules(trajectory.group), trajectory, now)
        self._store(adopted)
        self._next_trajectory_id = max(self._next_trajectory_id, adopted.trajectory_id + 1)
        return effects

    # ---------------------------------------------------------------- trajectories

    def _start_group(self, now: float, group: StartGroup) -> list[Send]:
        ids = list_siblings(group)
        if ids.start < self._next_trajectory_id:
            raise ProtocolError(f"group {group.group_id} was already started")
        effects: list[Send] = []
        started = self._policy.start(self._get_rules(group), group, now)
        if [trajectory.trajectory_id for trajectory, _ in started] != list(ids):
            raise UnusableInput(
                f"rl.rollout_policy: start must return one transition for each of the trajectories {ids}"
            )
        for trajectory, sends in started:
            placed, routed = self._route(trajectory, sends)
            self._store(placed)
            effects += routed
        self._next_trajectory_id = ids.stop
        self._last_changed = None
        return effects

    def _get_rules(self, group: StartGroup) -> Rules:
        try:
            return self._rules[group.purpose][group.task]
        except KeyError:
            raise ProtocolError(f'group {group.group_id} has the unknown task "{group.task}"') from None

    def _on_trajectory_event(self, now: float, event: TrajectoryEvent) -> list[Send]:
        trajectory = self.trajectories.get(event.trajectory_id)
        if isinstance(event, LeaseGranted | LeaseDeferred) and event.trajectory_id in self._aborted_while_leasing:
            self._last_changed = None
            return []
        if isinstance(event, CallAnswer) and self._is_late(trajectory, event):
            self._last_changed = trajectory
            return []
        if trajectory is None:
            raise ProtocolError(f"trajectory {event.trajectory_id} is not live in this rollout process")
        if isinstance(event, LeaseGranted) and event.incarnation <= self._departed_engines.get(event.engine, 0):
            return self._apply_transition(
                trajectory, *decline_lease(self._get_rules(trajectory.group), trajectory, event)
            )
        changed = self._advance(trajectory, now, event)
        if trajectory.executor and isinstance(event, CallAnswer):
            self.placement.on_answered(trajectory.executor, failed=isinstance(event, CallFailed))
        return self._apply_transitions(trajectory, changed)

    def _advance(self, trajectory: Trajectory, now: float, event: TrajectoryEvent | ExecutorLeft) -> list[Transition]:
        rules = self._get_rules(trajectory.group)
        return self._policy.advance(rules, trajectory, now, event, self.trajectories)

    def _apply_transitions(self, trajectory: Trajectory, changed: Sequence[Transition]) -> list[Send]:
        """Apply transitions of the event's trajectory and its siblings. Raises UnusableInput for other trajectories."""
        effects: list[Send] = []
        after_event: Trajectory | None = trajectory
        for after, sends in changed:
            before = self.trajectories.get(after.trajectory_id)
            if before is None or before.group.group_id != trajectory.group.group_id:
                raise UnusableInput(
                    f"rl.rollout_policy: an event of trajectory {trajectory.trajectory_id} changed {after.trajectory_id}, "
                    "which is no live sibling"
                )
            effects += self._apply_transition(before, after, sends)
            if after.trajectory_id == trajectory.trajectory_id:
                after_event = self._last_changed
        self._last_changed = after_event
        return effects

    def _apply_transition(self, before: Trajectory, after: Trajectory, sends: Sequence[Send]) -> list[Send]:
        if before.executor:
            self.placement.add_open_calls(before.executor, len(after.open_calls) - len(before.open_calls))
        self._last_changed, effects = self._route(after, sends)
        self._store(self._last_changed)
        return effects

    def _abort_group(self, now: float, group: GroupAborted) -> list[Send]:
        self._last_changed = None
        effects: list[Send] = []
        for trajectory_id in range(group.first_trajectory_id, group.first_trajectory_id + group.size):
            trajectory = self.trajectories.get(trajectory_id)
            if trajectory is None or trajectory.aborted:
                continue
            if trajectory.phase == "leasing":
                self._aborted_while_leasing[trajectory_id] = None
            after, sends = abort(self._get_rules(trajectory.group), trajectory, now, group.cause)
            effects += self._apply_transition(trajectory, after, sends)
        while len(self._aborted_while_leasing) > MAX_ABORTED_WHILE_LEASING:
            del self._aborted_while_leasing[next(iter(self._aborted_while_leasing))]
        return effects

    def _on_engine_left(self, now: float, event: EngineLeft) -> list[Send]:
        """Fail the engine's in-flight turns. The rollout policy retries a turn once, as after any failure."""
        if event.incarnation <= self._departed_engines.get(event.engine, 0):
            raise ProtocolError(f"incarnation {event.incarnation} of {event.engine} had already left")
        self._departed_engines[event.engine] = event.incarnation
        effects: list[Send] = []
        for trajectory_id in list(self.trajectories):
            each = self.trajectories.get(trajectory_id)  # a policy may have changed or ended the trajectory
            if (
                each is not None
                and each.phase == "generating"
                and each.engine == event.engine
                and each.engine_incarnation <= event.incarnation
            ):
                failed = TurnFailed(each.trajectory_id, each.turn, each.lease, f"engine left: {event.cause}")
                effects += self._apply_transitions(each, self._advance(each, now, failed))
        self._last_changed = None
        return effects

    def _is_late(self, trajectory: Trajectory | None, event: CallAnswer) -> bool:
        """Return whether the answer was in flight when its trajectory ended or its executor left."""
        if trajectory is None:
            return event.trajectory_id < self._next_trajectory_id
        return event.executor != trajectory.executor

    def _store(self, trajectory: Trajectory) -> None:
        before = self.trajectories.get(trajectory.trajectory_id)
        if before is not None:
            self._count(before, -1)
        if trajectory.phase == "ended":
            self.trajectories.pop(trajectory.trajectory_id)
            self.waiting_for_executor.pop(trajectory.trajectory_id, None)
            self.ended[trajectory.trajectory_id] = trajectory
        else:
            self.trajectories[trajectory.trajectory_id] = trajectory
            self._count(trajectory, 1)

    def _count(self, trajectory: Trajectory, change: int) -> None:
        self.num_by_phase[trajectory.phase] += change
        if trajectory.phase == "generating":
            self.num_generating[trajectory.engine] += change

    # ---------------------------------------------------------------- executors

    def _route(self, trajectory: Trajectory, sends: Sequence[Send]) -> tuple[Trajectory, list[Send]]:
        """Fill in the executor's address. Place a trajectory without an executor, or let it wait."""
        if trajectory.executor:
            return trajectory, [
                Send(trajectory.executor, send.message) if send.to == EXECUTOR else send for send in sends
            ]
        others = [send for send in sends if send.to != EXECUTOR]
        placed, requests = self._place(trajectory)
        return placed, [*others, *requests]

    def _place(self, trajectory: Trajectory) -> tuple[Trajectory, list[Send]]:
        """Assign an executor to a trajectory with open calls, or let it wait."""
        if not trajectory.open_calls:
            return trajectory, []
        executor = self.placement.find_least_busy()
        if executor is None:
            self.waiting_for_executor[trajectory.trajectory_id] = None
            return trajectory, []
        self.placement.add_open_calls(executor, len(trajectory.open_calls))
        requests = [Send(executor, request) for request in build_pending_requests(trajectory)]
        return replace(trajectory, executor=executor), requests

    def _on_executor_joined(self, event: ExecutorJoined) -> list[Send]:
        self.placement.add_executor(event)
        waiting, self.waiting_for_executor = self.waiting_for_executor, {}
        effects: list[Send] = []
        for trajectory_id in waiting:
            placed, requests = self._place(self.trajectories[trajectory_id])
            self._store(placed)
            effects += requests
        return self._report_rescheduled_calls(event.executor, effects, lost=0)

    def _on_executor_left(self, now: float, event: ExecutorLeft) -> list[Send]:
        self.placement.remove_executor(event.executor)
        displaced = [each for each in self.trajectories.values() if each.executor == event.executor]
        for each in displaced:
            self._store(replace(each, executor=""))
        effects: list[Send] = []
        for each in displaced:
            if trajectory := self.trajectories.get(each.trajectory_id):
                effects += self._apply_transitions(trajectory, self._advance(trajectory, now, event))
        lost = sum(each.trajectory_id not in self.trajectories for each in displaced)
        return self._report_rescheduled_calls(event.executor, effects, lost)

    def _report_rescheduled_calls(self, executor: str, effects: list[Send], lost: int) -> list[Send]:
        sent = sum(
            isinstance(effect.message, CodeRequested | EnvironmentCalled | AnswerSubmitted) for effect in effects
        )
        if not (sent or lost or self.waiting_for_executor):
            return effects
        return [
            *effects,
            Send(self._launcher, CallsRescheduled(executor, sent, len(self.waiting_for_executor), lost)),
        ]
