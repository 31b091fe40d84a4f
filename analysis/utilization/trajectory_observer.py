"""What a rollout's decisions leave in its structured log: each trajectory's end with its waits, and how many wait for what.

A trajectory's phase is read from what its decider sends: it waits for a lease, generates, waits for its tools or for its
grade, and ends once. Lines go to whoever is given as `say`: a structured log's `info`, or a recording's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from bus.messages import (
    AnyMessage,
    CodeRequested,
    LeaseParked,
    LeaseReleased,
    LeaseRequested,
    RunStarted,
    StartGroup,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnGenerated,
    TurnRequested,
)
from policies.decider import Send

Say = Callable[..., object]  # (event, **fields)
Phase = Literal["leasing", "generating", "calling", "grading"]
PHASES: tuple[Phase, ...] = ("leasing", "generating", "calling", "grading")
_WAITS: dict[Phase, str] = {
    "leasing": "lease_wait_s",
    "generating": "generation_s",
    "calling": "tools_s",
    "grading": "grading_s",
}


class _Life:
    """What is known of a live trajectory."""

    __slots__ = (
        "calls",
        "engine",
        "generated_tokens",
        "leases",
        "migrations",
        "phase",
        "prompt_tokens",
        "purpose",
        "since",
        "tokens",
        "turns",
        "waits",
    )

    def __init__(self, purpose: str, prompt_tokens: int, now: float) -> None:
        self.purpose = purpose
        self.phase: Phase = "leasing"
        self.since = now
        self.waits: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self.engine = ""
        self.leases = self.migrations = self.turns = self.calls = self.generated_tokens = 0
        self.prompt_tokens = self.tokens = prompt_tokens


class TrajectoryObserver:
    """An observer (actors.decider_loop.Observer) of rollouts. `say_counts` is to be called every 0.1 s of the run's time."""

    def __init__(self, say: Say) -> None:
        self._lives: dict[int, _Life] = {}
        self.phases = Counter[Phase]()  # live trajectories
        self.generating = Counter[str]()  # by engine
        self._said: dict[str, Any] = {}
        self.quiet = False
        self._aloud = say

    def _say(self, event: str, **fields: Any) -> None:
        if not self.quiet:
            self._aloud(event, **fields)

    def say_counts(self) -> None:
        """A line, unless it would be the one before."""
        now = self._counts()
        if now != self._said:
            self._say("trajectories.counted", **now)
        self._said = now

    def _counts(self) -> dict[str, Any]:
        engines = {engine: count for engine, count in self.generating.items() if count}
        return {**{phase: self.phases[phase] for phase in PHASES}, "engines": engines}

    def saw(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        match event:
            case RunStarted():
                self._lives.clear()
                self.phases.clear()
                self.generating.clear()
            case StartGroup():
                self._start(event, now)
            case TurnGenerated() if event.trajectory_id in self._lives:
                life = self._lives[event.trajectory_id]
                life.generated_tokens += len(event.token_ids) // 4
                life.turns += event.finish == "stop"
            case _:
                pass
        for effect in effects:
            self._sent(effect, now)

    def _start(self, group: StartGroup, now: float) -> None:
        for trajectory_id in range(group.first_trajectory_id, group.first_trajectory_id + group.size):
            self._lives[trajectory_id] = _Life(group.purpose, len(group.prompt_ids) // 4, now)
        self.phases["leasing"] += group.size

    def _sent(self, effect: Send, now: float) -> None:
        message = effect.message
        life = self._lives.get(getattr(message, "trajectory_id", -1))
        if life is None:
            return
        match message:
            case LeaseRequested():
                life.leases += 1
                self._enter(life, "leasing", now)
            case TurnRequested():
                life.migrations += life.engine not in ("", effect.to)
                life.engine = effect.to
                self._enter(life, "generating", now)
            case LeaseParked():
                self._enter(life, "calling", now)
            case LeaseReleased(tokens=tokens):
                life.tokens = tokens
                self._enter(life, "grading", now)
            case CodeRequested(call=call):
                life.calls = call + 1
            case TrajectoryFinished() as finished:
                self._end(finished.trajectory_id, life, now, _finished(finished))
            case TrajectoryFailed() as failed:
                told = {"group_id": failed.group_id, "cause": failed.cause}
                self._end(failed.trajectory_id, life, now, told)
            case TrajectoryAborted() as aborted:
                told = {"group_id": aborted.group_id, "cause": aborted.cause, "ending": "aborted"}
                self._end(aborted.trajectory_id, life, now, told)
            case _:
                pass

    def _enter(self, life: _Life, phase: Phase, now: float) -> None:
        if life.phase != phase:
            self._leave(life, now)
            life.phase, life.since = phase, now
            self.phases[phase] += 1
            self.generating[life.engine] += phase == "generating"

    def _leave(self, life: _Life, now: float) -> None:
        life.waits[life.phase] += now - life.since
        self.phases[life.phase] -= 1
        self.generating[life.engine] -= life.phase == "generating"

    def _end(self, trajectory_id: int, life: _Life, now: float, told: dict[str, Any]) -> None:
        """`told` is what the trajectory says of itself; of one that failed, the rest is what was seen of it."""
        del self._lives[trajectory_id]
        self._leave(life, now)
        seen: dict[str, Any] = {
            "purpose": life.purpose,
            "ending": "failed",
            "cause": "",
            "reward": None,
            "turns": life.turns,
            "calls": life.calls,
            "calls_failed": 0,
            "prompt_tokens": life.prompt_tokens,
            "tokens": life.tokens,
            "generated_tokens": life.generated_tokens,
            "leases": life.leases,
            "migrations": life.migrations,
            **{_WAITS[phase]: seconds for phase, seconds in life.waits.items()},
        }
        self._say("trajectory.ended", trajectory_id=trajectory_id, **{**seen, **told})


def _finished(message: TrajectoryFinished) -> dict[str, Any]:
    return {
        "group_id": message.group_id,
        "ending": message.ending,
        "reward": message.reward,
        "turns": message.turns,
        "calls": message.calls,
        "calls_failed": message.calls_failed,
        "prompt_tokens": message.prompt_tokens,
        "tokens": len(message.loss_mask),
        "generated_tokens": message.loss_mask.count(1),
        "lease_wait_s": message.lease_wait_s,
        "generation_s": message.generation_s,
        "tools_s": message.tools_s,
        "grading_s": message.grading_s,
    }
