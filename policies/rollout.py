"""All trajectories of one rollout process: each event goes to the one that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from bus.messages import AnyMessage, ProtocolError, RunStarted, StartGroup
from policies.decider import Send
from policies.dialogue import TextTokenizer
from policies.trajectory import Rules, Trajectory, TrajectoryEvent, advance, start

_TRAJECTORY_EVENTS: tuple[type, ...] = get_args(TrajectoryEvent)


class Rollout:
    """A decider (policies.decider.Decider). Trajectories share nothing but the rules."""

    def __init__(self, rules: Rules, tokenizer: TextTokenizer) -> None:
        self._rules = rules
        self._tokenizer = tokenizer
        self.trajectories: dict[int, Trajectory] = {}  # the live ones
        self._last: Trajectory | None = None

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        match event:
            case RunStarted():
                self.trajectories, self._last = {}, None
                return []
            case StartGroup():
                return self._start(now, event)
            case _ if isinstance(event, _TRAJECTORY_EVENTS):
                return self._advance(now, event)  # pyright: ignore[reportArgumentType] - narrowed by the tuple
            case _:
                raise ProtocolError(f"a rollout process has no use for {type(event).__name__}")

    def _start(self, now: float, group: StartGroup) -> list[Send]:
        ids = range(group.first_trajectory_id, group.first_trajectory_id + group.size)
        if any(trajectory_id in self.trajectories for trajectory_id in ids):
            raise ProtocolError(f"group {group.group_id} was started before")
        effects: list[Send] = []
        for trajectory_id in ids:
            self.trajectories[trajectory_id], sends = start(self._rules, group, trajectory_id, now)
            effects += sends
        self._last = None
        return effects

    def _advance(self, now: float, event: TrajectoryEvent) -> list[Send]:
        trajectory = self.trajectories.get(event.trajectory_id)
        if trajectory is None:
            raise ProtocolError(f"trajectory {event.trajectory_id} does not live here")
        trajectory, effects = advance(self._rules, self._tokenizer, trajectory, now, event)
        if trajectory.phase == "ended":
            del self.trajectories[event.trajectory_id]
        else:
            self.trajectories[event.trajectory_id] = trajectory
        self._last = trajectory
        return effects

    def state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        """The one trajectory that the event changed."""
        return self._last
