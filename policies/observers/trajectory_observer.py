"""Log lines of a rollout process: each trajectory's end with its phase times, and trajectories by
phase.

The messages that the decider sends determine a trajectory's phase: it waits for a lease,
generates, waits for tools or for its grade, and ends once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from bus.messages import (
    AnyMessage,
    CodeRequested,
    LeasePaused,
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

WriteLine = Callable[..., object]  # (event, **fields)
Phase = Literal["leasing", "generating", "calling", "grading"]
PHASES: tuple[Phase, ...] = ("leasing", "generating", "calling", "grading")
_WAIT_FIELDS: dict[Phase, str] = {
    "leasing": "lease_wait_s",
    "generating": "generation_s",
    "calling": "tools_s",
    "grading": "grading_s",
}


class _ObservedTrajectory:
    """State of a live trajectory."""

    __slots__ = (
        *("calls", "engine", "generated_tokens", "leases", "migrations", "phase", "phase_started_at"),
        *("prompt_tokens", "purpose", "tokens", "turns", "waits"),
    )

    def __init__(self, purpose: str, prompt_tokens: int, now: float) -> None:
        self.purpose = purpose
        self.phase: Phase = "leasing"
        self.phase_started_at = now
        self.waits: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self.engine = ""
        self.leases = self.migrations = self.turns = self.calls = self.generated_tokens = 0
        self.prompt_tokens = self.tokens = prompt_tokens


class TrajectoryObserver:
    """Observes a rollout process (actors.runtime.decider_loop.Observer).

    Call `write_counts` every 0.1 s of the run's time.
    """

    def __init__(self, write_line: WriteLine) -> None:
        self._live: dict[int, _ObservedTrajectory] = {}
        self.phases = Counter[Phase]()  # live trajectories
        self.generating = Counter[str]()  # by engine
        self._last_counts: dict[str, Any] = {}
        self.quiet = False
        self._write_line = write_line

    def _write_unless_quiet(self, event: str, **fields: Any) -> None:
        if not self.quiet:
            self._write_line(event, **fields)

    def write_counts(self) -> None:
        """Write the counts by phase unless they are unchanged."""
        counts = self._build_counts()
        if counts != self._last_counts:
            self._write_unless_quiet("trajectories.counted", **counts)
        self._last_counts = counts

    def _build_counts(self) -> dict[str, Any]:
        engines = {engine: count for engine, count in self.generating.items() if count}
        return {**{phase: self.phases[phase] for phase in PHASES}, "engines": engines}

    def on_decision(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        match event:
            case RunStarted():
                self._live.clear()
                self.phases.clear()
                self.generating.clear()
            case StartGroup():
                self._start(event, now)
            case TurnGenerated() if event.trajectory_id in self._live:
                trajectory = self._live[event.trajectory_id]
                trajectory.generated_tokens += len(event.token_ids) // 4
                trajectory.turns += event.finish == "stop"
            case _:
                pass
        for effect in effects:
            self._on_effect(effect, now)

    def _start(self, group: StartGroup, now: float) -> None:
        for trajectory_id in range(group.first_trajectory_id, group.first_trajectory_id + group.size):
            self._live[trajectory_id] = _ObservedTrajectory(group.purpose, len(group.prompt_ids) // 4, now)
        self.phases["leasing"] += group.size

    def _on_effect(self, effect: Send, now: float) -> None:
        message = effect.message
        trajectory = self._live.get(getattr(message, "trajectory_id", -1))
        if trajectory is None:
            return
        match message:
            case LeaseRequested():
                trajectory.leases += 1
                self._enter(trajectory, "leasing", now)
            case TurnRequested():
                trajectory.migrations += trajectory.engine not in ("", effect.to)
                trajectory.engine = effect.to
                self._enter(trajectory, "generating", now)
            case LeasePaused():
                self._enter(trajectory, "calling", now)
            case LeaseReleased(tokens=tokens):
                trajectory.tokens = tokens
                self._enter(trajectory, "grading", now)
            case CodeRequested(call=call):
                trajectory.calls = call + 1
            case TrajectoryFinished() as finished:
                self._end(finished.trajectory_id, trajectory, now, _describe_finished(finished))
            case TrajectoryFailed() as failed:
                reported = {"group_id": failed.group_id, "cause": failed.cause}
                self._end(failed.trajectory_id, trajectory, now, reported)
            case TrajectoryAborted() as aborted:
                reported = {"group_id": aborted.group_id, "cause": aborted.cause, "ending": "aborted"}
                self._end(aborted.trajectory_id, trajectory, now, reported)
            case _:
                pass

    def _enter(self, trajectory: _ObservedTrajectory, phase: Phase, now: float) -> None:
        if trajectory.phase != phase:
            self._leave(trajectory, now)
            trajectory.phase, trajectory.phase_started_at = phase, now
            self.phases[phase] += 1
            self.generating[trajectory.engine] += phase == "generating"

    def _leave(self, trajectory: _ObservedTrajectory, now: float) -> None:
        trajectory.waits[trajectory.phase] += now - trajectory.phase_started_at
        self.phases[trajectory.phase] -= 1
        self.generating[trajectory.engine] -= trajectory.phase == "generating"

    def _end(self, trajectory_id: int, trajectory: _ObservedTrajectory, now: float, reported: dict[str, Any]) -> None:
        """`reported` are fields of the trajectory's last message; they take precedence over
        observed ones."""
        del self._live[trajectory_id]
        self._leave(trajectory, now)
        observed: dict[str, Any] = {
            "purpose": trajectory.purpose,
            "ending": "failed",
            "cause": "",
            "reward": None,
            "turns": trajectory.turns,
            "calls": trajectory.calls,
            "calls_failed": 0,
            "prompt_tokens": trajectory.prompt_tokens,
            "tokens": trajectory.tokens,
            "generated_tokens": trajectory.generated_tokens,
            "leases": trajectory.leases,
            "migrations": trajectory.migrations,
            **{_WAIT_FIELDS[phase]: seconds for phase, seconds in trajectory.waits.items()},
        }
        self._write_unless_quiet("trajectory.ended", trajectory_id=trajectory_id, **{**observed, **reported})


def _describe_finished(message: TrajectoryFinished) -> dict[str, Any]:
    return {
        "group_id": message.group_id,
        "ending": message.ending,
        "reward": message.reward,
        "turns": message.turns,
        "calls": message.calls,
        "calls_failed": message.calls_failed,
        "prompt_tokens": message.record.prompt_tokens,
        "tokens": message.record.num_tokens,
        "generated_tokens": message.record.loss_mask.count(1),
        "lease_wait_s": message.lease_wait_s,
        "generation_s": message.generation_s,
        "tools_s": message.tools_s,
        "grading_s": message.grading_s,
    }
