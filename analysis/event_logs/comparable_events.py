"""Builds the event streams by which two runs are compared.

Comparable events have no arrival times, durations or workers. Each trajectory has a stream: its start, its
turns, the results of its calls, its grade and its end. A turn is one event even if it took several
leases. Steps, evaluations, weights, lines of metrics.jsonl and the newest checkpoint have streams
too. If a resumed run repeats a part, the later one counts.
"""

import hashlib
from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec.structs import replace

from asterism.analysis.event_logs.merged_events import EventFilter, MergedEvent, merge_events, read_start_time
from asterism.analysis.metric_lines import decode_metric_lines
from asterism.bus.messages import (
    AnswerGraded,
    AnyMessage,
    CallFailed,
    CodeFinished,
    EnvironmentReturned,
    EvaluationFinished,
    StartGroup,
    StepCollected,
    StepTrained,
    TokenRecord,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnGenerated,
    WeightsPublished,
    name_evaluation,
)
from asterism.configs.file_manifest import check_file
from asterism.configs.run_folder import RunFolder

_KINDS = (
    *(StartGroup, TurnGenerated, CodeFinished, EnvironmentReturned, CallFailed, AnswerGraded),
    *(TrajectoryFinished, TrajectoryFailed, TrajectoryAborted),
    *(StepCollected, StepTrained, EvaluationFinished, WeightsPublished),
)
_EXCLUDED_FIELDS = ("executor", "trajectory_id", "lease")  # these name the worker, the placement and the stream
_CACHE_METRICS = ("recomputed_share",)  # metrics that depend on cache sizes and on the arrival order of requests
_ENGINE_METRICS = ("probe_engines", "probe_unmoved_engines")  # counts of engines
# The recorder restarts its comparison of probes at each launch. `probe_gap` is a result and stays.
_LAUNCH_METRICS = ("probe_mismatch", "probe_moved", "probe_followed", "probe_since")
_PLACEMENT_METRICS = {*_CACHE_METRICS, *_ENGINE_METRICS, *_LAUNCH_METRICS}
_MEASURED_METRICS = ("mfu", "peak_memory_gib")  # metrics that depend on time and memory of the machine
_SORTS_LAST = (inf,)
Timed = TypeVar("Timed", bound=msgspec.Struct)


class ComparableEvent(NamedTuple):
    at_s: float  # seconds since the run's start
    label: str
    contents: dict[str, object]
    source: str  # PROCESS:SEQ, or a file


EventStreams = dict[str, list[ComparableEvent]]  # keys: "trajectory 7", "step 3", "metrics, step 3"


def read_event_streams(folder: RunFolder) -> EventStreams:
    """Read the streams of a run. Raises UnusableInput if there is no log."""
    start_time = read_start_time(folder)
    logged_streams = _LoggedStreams()
    for logged in merge_events(folder, EventFilter(kinds=tuple(kind.__name__ for kind in _KINDS))):
        if logged.decision is None or not logged.decision.is_refused:
            logged_streams.add_event(logged, logged.event.time - start_time)
    streams = logged_streams.build_streams()
    return {**streams, **_read_metric_lines(folder, streams), **_read_newest_checkpoint(folder, streams)}


class _LoggedStreams:
    def __init__(self) -> None:
        self._events: dict[str, dict[tuple[float, ...], ComparableEvent]] = {}  # events by stream and sort key
        self._last_turns: dict[int, int] = {}  # latest turn by trajectory

    def build_streams(self) -> EventStreams:
        return {stream: [events[key] for key in sorted(events)] for stream, events in self._events.items()}

    def add_event(self, logged: MergedEvent, at_s: float) -> None:
        message = logged.envelope.message
        event = ComparableEvent(at_s, type(message).__name__, extract_contents(message), logged.name)
        match message:
            case StepTrained() if not message.metrics:
                pass  # the learner has loaded the checkpoint of this step
            case StepCollected() | StepTrained() | EvaluationFinished() | WeightsPublished():
                if logged.event.actor == "recipe":  # the recorder receives a copy
                    self._put(_name_stream(message), (isinstance(message, StepTrained),), event)
            case StartGroup():
                for trajectory in range(message.first_trajectory_id, message.first_trajectory_id + message.size):
                    self._last_turns[trajectory] = -1
                    self._events[f"trajectory {trajectory}"] = {(-1,): event}
            case _:
                trajectory = logged.event.trajectory
                assert trajectory is not None  # all other kinds have a trajectory
                self._add_trajectory_event(trajectory, message, event)

    def _add_trajectory_event(self, trajectory: int, message: AnyMessage, event: ComparableEvent) -> None:
        stream, last_turn = f"trajectory {trajectory}", self._last_turns.get(trajectory, -1)
        match message:
            case TurnGenerated(turn=turn):
                self._last_turns[trajectory] = turn
                self._merge_turn(stream, (turn, 0), event._replace(label=f"{event.label} of turn {turn}"))
            case CodeFinished(call=call) | EnvironmentReturned(call=call) | CallFailed(call=call):
                self._put(stream, (last_turn, 1, call), event._replace(label=f"{event.label} of call {call}"))
            case AnswerGraded():
                self._put(stream, (last_turn, 2), event)
            case _:
                self._put(stream, _SORTS_LAST, event)

    def _put(self, stream: str, sort_key: tuple[float, ...], event: ComparableEvent) -> None:
        self._events.setdefault(stream, {})[sort_key] = event

    def _merge_turn(self, stream: str, sort_key: tuple[float, ...], event: ComparableEvent) -> None:
        """Append the tokens to the turn's tokens from an earlier lease."""
        earlier = self._events.get(stream, {}).get(sort_key)
        if earlier is not None:
            for name in ("token_ids", "logprobs", "versions"):
                event.contents[name] = cast(bytes, earlier.contents[name]) + cast(bytes, event.contents[name])
            event = event._replace(at_s=earlier.at_s, source=earlier.source)
        self._put(stream, sort_key, event)


def _name_stream(message: StepCollected | StepTrained | EvaluationFinished | WeightsPublished) -> str:
    match message:
        case EvaluationFinished(label=label, version=version):
            return name_evaluation(label, version)
        case WeightsPublished(version=version):
            return f"weights of version {version}"
        case _:
            return f"step {message.step}"


# ---------------------------------------------------------------- files of the run


def _read_metric_lines(folder: RunFolder, logged: Mapping[str, list[ComparableEvent]]) -> EventStreams:
    """Read the streams of metrics.jsonl; the time of a line is the end of its step or evaluation."""
    streams: EventStreams = {}
    for values in decode_metric_lines(folder.metrics) if folder.metrics.exists() else ():
        label = values.get("label", "")
        step = values["step"]
        at_s = _get_end_time(logged, name_evaluation(label, step) if label else f"step {step}")
        name = label or values.get("check", "")  # name of an evaluation or of a health check
        stream = " ".join(part for part in (values["kind"], name, str(step)) if part)
        contents: dict[str, object] = {
            name: value for name, value in _drop_times(values).items() if name not in _PLACEMENT_METRICS
        }
        streams[f"metrics, {stream}"] = [ComparableEvent(at_s, "line", contents, folder.metrics.name)]
    return streams


def _read_newest_checkpoint(folder: RunFolder, logged: Mapping[str, list[ComparableEvent]]) -> EventStreams:
    """Return one event per file of the newest checkpoint; the event's time is the end of the step."""
    newest = max(folder.checkpoints.glob("step_*"), default=None)
    if newest is None:
        return {}
    at_s = _get_end_time(logged, f"step {int(newest.name.removeprefix('step_'))}")
    events: list[ComparableEvent] = []
    for path in sorted(path for path in newest.rglob("*") if path.is_file()):
        check_file(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()
        label = f"file {path.relative_to(newest)}"
        events.append(ComparableEvent(at_s, label, {"blake2b": digest}, str(path.relative_to(folder.path))))
    return {f"checkpoint {newest.name}": events}


def _get_end_time(logged: Mapping[str, list[ComparableEvent]], stream: str) -> float:
    """Return the end of the stream, or the end of the log if it lacks the stream."""
    events = [logged[stream][-1]] if stream in logged else [each[-1] for each in logged.values()]
    return max((event.at_s for event in events), default=0.0)


# ---------------------------------------------------------------- removing times


def extract_contents(message: AnyMessage) -> dict[str, object]:
    contents: dict[str, object] = msgspec.structs.asdict(strip_times(message))
    if isinstance(record := contents.pop("record", None), TokenRecord):
        contents |= msgspec.structs.asdict(record)
    return {name: value for name, value in contents.items() if name not in _EXCLUDED_FIELDS}


def strip_times(message: Timed) -> Timed:
    """Return the message with all durations 0 and without the machine-specific path of weights."""
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
    return {name: value for name, value in values.items() if not _is_time(name) and name not in _MEASURED_METRICS}


def _is_time(name: str) -> bool:
    return name.endswith("_s")
