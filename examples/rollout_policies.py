"""Three rollout policies: a fixed number of turns, best-of-n turns, and tree search.

    asterism run configs/tiny.toml --name tree --set rl.rollout_policy=examples/rollout_policies.py:TreeSearch

asterism/policies/rollout/rollout_policy.py describes the interface.
"""

from array import array
from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from asterism.bus.messages import ExecutorLeft, LeaseGranted, StartGroup, TurnGenerated, TurnRequested
from asterism.policies.decider import Send
from asterism.policies.rollout import transitions
from asterism.policies.rollout.endings import Transition, request_lease
from asterism.policies.rollout.rollout_policy import IndependentTrajectories, branch, is_parked, list_siblings, park
from asterism.policies.rollout.trajectory import Rules, Trajectory, TrajectoryEvent
from asterism.policies.seeded_random import mix

Event = TrajectoryEvent | ExecutorLeft


class FixedTurns(IndependentTrajectories):
    """A policy that appends a user's request for a check to each answer, until the model has had `num_turns` turns."""

    num_turns = 3
    request = "Check each step of your answer, and answer again."

    def advance(
        self, rules: Rules, trajectory: Trajectory, now: float, event: Event, live: Mapping[int, Trajectory]
    ) -> list[Transition]:
        after, sends = transitions.advance(rules, trajectory, now, event)
        is_early = isinstance(event, TurnGenerated) and after.turn < self.num_turns
        if is_early and not after.aborted and after.phase in ("grading", "ended") and after.ending != "length":
            added = rules.renderer.render_user_turn(after.record, self.request)
            if added is not None and after.record.response_tokens + len(added) < rules.response_tokens:
                record = after.record.append_observation(added)
                continued = replace(
                    trajectory.enter_phase("leasing", now), record=record, turn=after.turn, turn_start=0
                )
                return [request_lease(rules, continued)]
        return [(after, sends)]


class _Candidates(NamedTuple):
    count: int
    best: TurnGenerated


class BestOfN(IndependentTrajectories):
    """A policy that samples each turn `num_candidates` times and keeps the sample with the highest mean logprob."""

    num_candidates = 4

    def __init__(self) -> None:
        self._candidates: dict[int, _Candidates] = {}  # candidates of the current turn, by trajectory

    def advance(
        self, rules: Rules, trajectory: Trajectory, now: float, event: Event, live: Mapping[int, Trajectory]
    ) -> list[Transition]:
        tid = trajectory.trajectory_id
        if isinstance(event, LeaseGranted) and tid in self._candidates:
            after, sends = transitions.advance(rules, trajectory, now, event)
            return [(after, [_change_seed(send, self._candidates[tid].count) for send in sends])]
        if not isinstance(event, TurnGenerated) or event.finish != "stop" or trajectory.aborted:
            return super().advance(rules, trajectory, now, event, live)
        trajectory.expect_turn(event)
        count, best = self._candidates.pop(tid, _Candidates(0, event))
        best = max(best, event, key=_mean_logprob)
        if count + 1 == self.num_candidates:
            return super().advance(rules, trajectory, now, replace(best, lease=event.lease), live)
        self._candidates = {each: found for each, found in self._candidates.items() if each in live}
        self._candidates[tid] = _Candidates(count + 1, best)
        return [request_lease(rules, trajectory.enter_phase("leasing", now))]


def _mean_logprob(turn: TurnGenerated) -> float:
    logprobs = array("f", turn.logprobs)
    return sum(logprobs) / len(logprobs)


def _change_seed(send: Send, candidate: int) -> Send:
    if isinstance(send.message, TurnRequested):
        return Send(send.to, replace(send.message, seed=mix(send.message.seed, candidate) >> 1))
    return send


class TreeSearch:
    """A search that begins with one trajectory. After each turn with a tool call, a parked sibling branches off."""

    def start(self, rules: Rules, group: StartGroup, now: float) -> list[Transition]:
        first, *others = list_siblings(group)
        return [transitions.start(rules, group, first, now), *(park(group, each, now) for each in others)]

    def advance(
        self, rules: Rules, trajectory: Trajectory, now: float, event: Event, live: Mapping[int, Trajectory]
    ) -> list[Transition]:
        after, sends = transitions.advance(rules, trajectory, now, event)
        siblings = [live[each] for each in list_siblings(trajectory.group) if each in live]
        parked = [each for each in siblings if is_parked(each)]
        changed = [(after, sends)]
        is_between_turns = after.phase == "leasing" and after.turn > 0 and after.turn_start == 0
        if parked and is_between_turns and trajectory.phase == "calling":
            changed.append(branch(rules, parked[0], after, now))
        elif after.phase == "ended" and len(siblings) == len(parked) + 1:  # no other trajectory could branch
            changed += [transitions.start(rules, each.group, each.trajectory_id, now) for each in parked]
        return changed
