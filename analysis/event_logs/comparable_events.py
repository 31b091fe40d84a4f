"""Builds the event streams by which two runs are compared.

Events have no arrival times, durations or workers. Each trajectory has a stream: its start, its
turns, the results of its calls, its grade and its end. A turn is one event even if it took several
leases. Each step and each evaluation has a stream too.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec.structs import replace

from analysis.event_logs.merged_events import EventFilter, MergedEvent, merge_events, read_start_time
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

# ("trajectory", number, count of starts with that number) or ("step", number, 0), ...
EventStream = tuple[str, int, int]
_KINDS = (
    *(StartGroup, TurnGenerated, CodeFinished, CallFailed, AnswerGraded),
    *(TrajectoryFinished, TrajectoryFailed, TrajectoryAborted),
    *(StepCollected, StepTrained, EvaluationFinished),
)
# Worker, placement, and part of the stream's name.
_EXCLUDED_FIELDS = ("executor", "trajectory_id", "lease")
_SORTS_LAST = (inf,)
Timed = TypeVar("Timed", bound=msgspec.Struct)


class ComparableEvent(NamedTuple):
    at_s: float  # since the run's start
    label: str
    contents: dict[str, object]
    source: str  # PROCESS:SEQ, or the file of a line of metrics


def read_event_streams(folder: RunFolder) -> dict[EventStream, list[ComparableEvent]]:
    """Raises UnusableInput if there is no log."""
    start_time = read_start_time(folder)
    trajectories = _TrajectoryStreams()
    steps: dict[EventStream, list[ComparableEvent]] = {}
    for logged in merge_events(folder, EventFilter(kinds=tuple(kind.__name__ for kind in _KINDS))):
        message, at_s = logged.envelope.message, logged.event.time - start_time
        if isinstance(message, StepCollected | StepTrained | EvaluationFinished):
            if logged.event.actor == "recipe":  # the recorder receives a copy
                event = ComparableEvent(at_s, type(message).__name__, extract_contents(message), logged.name)
                steps.setdefault(_identify_stream(message), []).append(event)
        else:
            trajectories.add_event(logged, message, at_s)
    return {**trajectories.build_streams(), **steps, **_read_metric_lines(folder, steps)}


def _identify_stream(message: StepCollected | StepTrained | EvaluationFinished) -> EventStream:
    if isinstance(message, EvaluationFinished):
        return f"evaluation {message.label}", 0, 0
    return "step", message.step, 0


class _TrajectoryStreams:
    def __init__(self) -> None:
        self._events: dict[EventStream, dict[tuple[float, ...], ComparableEvent]] = {}
        self._occurrences: dict[int, int] = {}  # starts by number: a resumed run may reuse a number
        self._last_turns: dict[int, int] = {}  # latest turn by trajectory

    def build_streams(self) -> dict[EventStream, list[ComparableEvent]]:
        return {
            stream: [events[sort_key] for sort_key in sorted(events)]
            for stream, events in self._events.items()
            if events
        }

    def add_event(self, logged: MergedEvent, message: AnyMessage, at_s: float) -> None:
        name, contents = type(message).__name__, extract_contents(message)
        if isinstance(message, StartGroup):
            for trajectory in range(message.first_trajectory_id, message.first_trajectory_id + message.size):
                self._occurrences[trajectory] = self._occurrences.get(trajectory, 0) + 1
                self._last_turns[trajectory] = -1
                self._put(trajectory, (-1,), ComparableEvent(at_s, name, contents, logged.name))
            return
        trajectory = logged.event.trajectory
        assert trajectory is not None  # true of all other kinds
        if isinstance(message, TurnGenerated):
            self._last_turns[trajectory] = message.turn
            self._merge_turn(
                trajectory, message, ComparableEvent(at_s, f"{name} of turn {message.turn}", contents, logged.name)
            )
        elif isinstance(message, CodeFinished | CallFailed):
            sort_key = (self._last_turns.get(trajectory, -1), 1, message.call)
            self._put(
                trajectory, sort_key, ComparableEvent(at_s, f"{name} of call {message.call}", contents, logged.name)
            )
        elif isinstance(message, AnswerGraded):
            self._put(
                trajectory,
                (self._last_turns.get(trajectory, -1), 2),
                ComparableEvent(at_s, name, contents, logged.name),
            )
        else:
            self._put(trajectory, _SORTS_LAST, ComparableEvent(at_s, name, contents, logged.name))

    def _put(self, trajectory: int, sort_key: tuple[float, ...], event: ComparableEvent) -> None:
        stream = "trajectory", trajectory, self._occurrences.get(trajectory, 1)
        self._events.setdefault(stream, {})[sort_key] = event

    def _merge_turn(self, trajectory: int, message: TurnGenerated, event: ComparableEvent) -> None:
        """Appends the tokens to the turn's tokens from an earlier lease."""
        stream = "trajectory", trajectory, self._occurrences.get(trajectory, 1)
        earlier = self._events.get(stream, {}).get((message.turn, 0))
        if earlier is not None:
            for name in ("token_ids", "logprobs", "versions"):
                event.contents[name] = cast(bytes, earlier.contents[name]) + cast(bytes, event.contents[name])
            event = event._replace(at_s=earlier.at_s, source=earlier.source)
        self._put(trajectory, (message.turn, 0), event)


def _read_metric_lines(
    folder: RunFolder, steps: Mapping[EventStream, list[ComparableEvent]]
) -> dict[EventStream, list[ComparableEvent]]:
    """Streams of metrics.jsonl; a line has the time at which its step or evaluation ended."""
    streams: dict[EventStream, list[ComparableEvent]] = {}
    lines = folder.metrics.read_bytes().splitlines(keepends=True) if folder.metrics.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            continue  # incomplete: a live run is writing it
        try:
            values = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise UnusableInput(f"{folder.metrics}, line {number}: {error}") from error
        label, step = values.get("label", ""), int(values["step"])
        events = steps.get((f"evaluation {label}", 0, 0) if label else ("step", step, 0), [])
        at_s = events[-1].at_s if events else 0.0
        stream = f"metrics, {values['kind']} {label}".rstrip(), step, 0
        contents: dict[str, object] = _drop_times(values)
        streams.setdefault(stream, []).append(ComparableEvent(at_s, "line", contents, folder.metrics.name))
    return streams


# ---------------------------------------------------------------- removing times


def extract_contents(message: AnyMessage) -> dict[str, object]:
    timeless = strip_times(message)
    return {name: getattr(timeless, name) for name in timeless.__struct_fields__ if name not in _EXCLUDED_FIELDS}


def strip_times(message: Timed) -> Timed:
    """The message with all durations 0 and without the machine-specific path of weights."""
    changes: dict[str, object] = {}
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if _is_time(name):
            changes[name] = 0.0
        elif isinstance(value, msgspec.Struct):
            changes[name] = strip_times(value)
        elif isinstance(value, dict):
            changes[name] = _drop_times(cast("dict[str, Any]", value))
    if isinstance(message, WeightsPublished):
        changes["path"] = ""
    return replace(message, **changes) if changes else message


def _drop_times(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not _is_time(name)}


def _is_time(name: str) -> bool:
    return name.endswith("_s")
