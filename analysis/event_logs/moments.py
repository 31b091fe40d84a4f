"""What two runs are compared by: what was decided on, without when it arrived, how long it took and who did it.

Each trajectory has its thread of moments: how it began, what it said in each turn, what its calls came to, how it was
graded, how it ended. A turn counts as a whole, however many leases it took. Each step and each evaluation has one too.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec.structs import replace

from analysis.event_logs.merging import Choice, Logged, began_at, merged
from bus.messages import (
    AnswerGraded,
    AnyMessage,
    CallFailed,
    CodeFinished,
    EvaluationFinished,
    StartGroup,
    StepCollected,
    StepTrained,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnGenerated,
    WeightsPublished,
)
from configs.errors import UnusableInput
from configs.run_folder import RunFolder

Thread = tuple[str, int, int]  # "trajectory", its number, and which of those with that number; or "step", ...
_KINDS = (
    *(StartGroup, TurnGenerated, CodeFinished, CallFailed, AnswerGraded),
    *(TrajectoryFinished, TrajectoryFailed, TrajectoryAborted),
    *(StepCollected, StepTrained, EvaluationFinished),
)
_ELSEWHERE = ("executor", "trajectory_id", "lease")  # says who and where, or which of the threads it is
_AFTER_ALL = (inf,)
Timed = TypeVar("Timed", bound=msgspec.Struct)


class Moment(NamedTuple):
    at: float  # seconds since the run began
    what: str
    contents: dict[str, object]
    logged: str  # PROCESS:SEQ; where there is no event, the file


def threads_of(folder: RunFolder) -> dict[Thread, list[Moment]]:
    """Raises UnusableInput if there is no log."""
    began = began_at(folder)
    trajectories = _Trajectories()
    steps: dict[Thread, list[Moment]] = {}
    for logged in merged(folder, Choice(kinds=tuple(kind.__name__ for kind in _KINDS))):
        message, at = logged.envelope.message, logged.event.time - began
        if isinstance(message, StepCollected | StepTrained | EvaluationFinished):
            if logged.event.actor == "recipe":  # the recorder hears of it as well
                moment = Moment(at, type(message).__name__, contents_of(message), logged.name)
                steps.setdefault(_thread_of(message), []).append(moment)
        else:
            trajectories.take(logged, message, at)
    return {**trajectories.threads(), **steps, **_metrics(folder, steps)}


def _thread_of(message: StepCollected | StepTrained | EvaluationFinished) -> Thread:
    if isinstance(message, EvaluationFinished):
        return f"evaluation {message.label}", 0, 0
    return "step", message.step, 0


class _Trajectories:
    def __init__(self) -> None:
        self._moments: dict[Thread, dict[tuple[float, ...], Moment]] = {}
        self._lives: dict[int, int] = {}  # of each number: a resumed run may give it again
        self._turns: dict[int, int] = {}  # the last that each has begun

    def threads(self) -> dict[Thread, list[Moment]]:
        return {
            thread: [moments[place] for place in sorted(moments)]
            for thread, moments in self._moments.items()
            if moments
        }

    def take(self, logged: Logged, message: AnyMessage, at: float) -> None:
        name, contents = type(message).__name__, contents_of(message)
        if isinstance(message, StartGroup):
            for place in range(message.size):
                trajectory = message.first_trajectory_id + place
                self._lives[trajectory] = self._lives.get(trajectory, 0) + 1
                self._turns[trajectory] = -1
                self._put(trajectory, (-1,), Moment(at, name, contents, logged.name))
            return
        trajectory = logged.event.trajectory
        assert trajectory is not None  # the kinds that are left are about one each
        if isinstance(message, TurnGenerated):
            self._turns[trajectory] = message.turn
            self._put_turn(trajectory, message, Moment(at, f"{name} of turn {message.turn}", contents, logged.name))
        elif isinstance(message, CodeFinished | CallFailed):
            place = (self._turns.get(trajectory, -1), 1, message.call)
            self._put(trajectory, place, Moment(at, f"{name} of call {message.call}", contents, logged.name))
        elif isinstance(message, AnswerGraded):
            self._put(trajectory, (self._turns.get(trajectory, -1), 2), Moment(at, name, contents, logged.name))
        else:
            self._put(trajectory, _AFTER_ALL, Moment(at, name, contents, logged.name))

    def _put(self, trajectory: int, place: tuple[float, ...], moment: Moment) -> None:
        thread = "trajectory", trajectory, self._lives.get(trajectory, 1)
        self._moments.setdefault(thread, {})[place] = moment

    def _put_turn(self, trajectory: int, message: TurnGenerated, moment: Moment) -> None:
        """Behind the part of it that was generated under an earlier lease."""
        thread = "trajectory", trajectory, self._lives.get(trajectory, 1)
        earlier = self._moments.get(thread, {}).get((message.turn, 0))
        if earlier is not None:
            for name in ("token_ids", "logprobs", "versions"):
                moment.contents[name] = cast(bytes, earlier.contents[name]) + cast(bytes, moment.contents[name])
            moment = moment._replace(at=earlier.at, logged=earlier.logged)
        self._put(trajectory, (message.turn, 0), moment)


def _metrics(folder: RunFolder, steps: Mapping[Thread, list[Moment]]) -> dict[Thread, list[Moment]]:
    """The lines of the metrics file. Each is placed in time where its step was trained, or its evaluation ended."""
    threads: dict[Thread, list[Moment]] = {}
    lines = folder.metrics.read_bytes().splitlines(keepends=True) if folder.metrics.exists() else []
    for place, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            continue  # a run that goes on is about to write the rest
        try:
            values = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise UnusableInput(f"{folder.metrics}, line {place}: {error}") from error
        label, step = values.get("label", ""), int(values["step"])
        moments = steps.get((f"evaluation {label}", 0, 0) if label else ("step", step, 0), [])
        at = moments[-1].at if moments else 0.0
        thread = f"metrics, {values['kind']} {label}".rstrip(), step, 0
        contents: dict[str, object] = _timeless(values)
        threads.setdefault(thread, []).append(Moment(at, "line", contents, folder.metrics.name))
    return threads


# ---------------------------------------------------------------- without times


def contents_of(message: AnyMessage) -> dict[str, object]:
    timeless = without_times(message)
    return {name: getattr(timeless, name) for name in timeless.__struct_fields__ if name not in _ELSEWHERE}


def without_times(message: Timed) -> Timed:
    """With every duration at 0, and without the address of weights, which is this machine's."""
    changes: dict[str, object] = {}
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if _is_time(name):
            changes[name] = 0.0
        elif isinstance(value, msgspec.Struct):
            changes[name] = without_times(value)
        elif isinstance(value, dict):
            changes[name] = _timeless(cast("dict[str, Any]", value))
    if isinstance(message, WeightsPublished):
        changes["path"] = ""
    return replace(message, **changes) if changes else message


def _timeless(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not _is_time(name)}


def _is_time(name: str) -> bool:
    return name.endswith("_s")
