"""Read the lines of the structured logs that the report needs. Other lines are ignored.

A truncated line, or a line without a required field, is left out, counted and named.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import polars as pl

from asterism.analysis.metric_lines import AnalysisError, read_bytes
from asterism.bus.messages import EngineLoadReported, LedgerReported

_BETWEEN_LAUNCHES_S = 1e-3  # seconds between launches; keeps their lines in order
MAX_NAMED_UNUSABLE = 3  # unusable lines that are named; the others are only counted
# Field by which an event is unique within a launch.
# A process that restarts after a kill may repeat events.
_UNIQUE_BY = {
    "trajectory.ended": "trajectory_id",
    "group.started": "group_id",
    "step.requested": "name",
    "step.ended": "name",
}


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    timestamp: datetime  # has a time zone
    process: str = ""  # default: the file's name


class RunStartedLine(LogLine, frozen=True, kw_only=True):
    step: int = 0  # the last completed step


class EngineStartedLine(LogLine, frozen=True, kw_only=True):
    kv_tokens: int
    page_tokens: int


class WeightsLoadedLine(LogLine, frozen=True, kw_only=True):
    version: int
    load_s: float
    probe_tokens: int = 0  # tokens generated outside trajectories, for the comparison with the learner


class TrajectoriesCountedLine(LogLine, frozen=True, kw_only=True):
    """Live trajectories of a rollout process, by phase."""

    leasing: int
    generating: int
    calling: int
    grading: int
    engines: dict[str, int]  # generating trajectories by engine; zeros may be left out


class TrajectoryEndedLine(LogLine, frozen=True, kw_only=True):
    trajectory_id: int
    group_id: int
    purpose: str = ""
    ending: str
    cause: str = ""
    turns: int
    calls: int
    tokens: int
    generated_tokens: int
    migrations: int = 0
    lease_wait_s: float
    generation_s: float
    tools_s: float
    grading_s: float


class StepRequestedLine(LogLine, frozen=True, kw_only=True):
    name: str  # "step 3", "evaluation start_greedy"


class GroupStartedLine(LogLine, frozen=True, kw_only=True):
    name: str  # name of the step
    group_id: int
    size: int


class StepEndedLine(LogLine, frozen=True, kw_only=True):
    """The end of a step or an evaluation. The parts of a step are consecutive; an evaluation has no parts."""

    name: str
    step_s: float | None = None
    rollout_s: float | None = None
    train_s: float | None = None
    weights_s: float | None = None


class ExecutorLoadLine(LogLine, frozen=True, kw_only=True):
    """The fields of asterism.sandbox.load_gauge.SandboxLoad."""

    executor: str
    slots: int
    running: int
    queued: int
    done: int
    busy_s: float
    running_s: float
    queued_s: float
    code_s: float | None = None


def _derive_line(struct: type[msgspec.Struct], unused_fields: Sequence[str], **defaults: str) -> type[LogLine]:
    """Derive a line type with the fields of `struct`, without `unused_fields`."""
    used = [field for field in msgspec.structs.fields(struct) if field.name not in unused_fields]
    fields = [(field.name, field.type, defaults.get(field.name, msgspec.NODEFAULT)) for field in used]
    line = msgspec.defstruct(f"{struct.__name__}Line", fields, bases=(LogLine,), frozen=True, kw_only=True)
    return cast("type[LogLine]", line)


LINE_TYPES: Mapping[str, type[LogLine]] = {
    "run.started": RunStartedLine,
    "engine.started": EngineStartedLine,
    # If the line names no engine, the process is the engine.
    "engine.load": _derive_line(EngineLoadReported, ("version", "incarnation"), engine=""),
    "weights.loaded": WeightsLoadedLine,
    "ledger.reported": _derive_line(LedgerReported, ("running", "idle", "waiting", "used_tokens")),
    "executor.load": ExecutorLoadLine,
    "trajectories.counted": TrajectoriesCountedLine,
    "trajectory.ended": TrajectoryEndedLine,
    "step.requested": StepRequestedLine,
    "group.started": GroupStartedLine,
    "step.ended": StepEndedLine,
}

_COLUMNS: Mapping[Any, Any] = {
    int: pl.Int64,
    float: pl.Float64,
    str: pl.String,
    float | None: pl.Float64,
    dict[str, int]: pl.List(pl.Struct({"engine": pl.String, "asked": pl.Int64})),
}


_SCHEMAS: Mapping[str, dict[str, Any]] = {
    event: {
        **{field.name: _COLUMNS[field.type] for field in msgspec.structs.fields(kind) if field.name != "timestamp"},
        "t": pl.Float64,
    }
    for event, kind in LINE_TYPES.items()
}


class _EventName(msgspec.Struct, frozen=True):
    event: str = ""


class LogTables(NamedTuple):
    """Tables of the logs, one for each of LINE_TYPES, sorted by `t`: seconds since `began_at`, without the pauses.

    A pause lasts from the last line of a launch to the start of the next launch.
    """

    frames: Mapping[str, pl.DataFrame]
    began_at: datetime | None  # time of the earliest line
    end_s: float  # `t` of the latest line
    launch_ends_s: Sequence[float]  # `t` of the last line of each launch except the last launch
    paused_s: float
    num_lines: int
    num_unusable: int
    unusable: Sequence[str]  # the first unusable lines: file, line number, cause

    def find_first_weights_s(self) -> float:
        """Return the time of the first loaded weights, after the cold start, or 0 if it is not in the logs."""
        loaded = self.frames["weights.loaded"]["t"]
        return float(loaded[0]) if loaded.len() else 0.0


def read_log_tables(logs: Path) -> LogTables:
    """Read all `*.jsonl` of a folder. Raises AnalysisError if it has no such file."""
    paths = sorted(logs.glob("*.jsonl"))
    if not paths:
        raise AnalysisError(f"{logs}: no logs (*.jsonl) to report on; is {logs.parent} a run folder?")
    reader = _LogReader()
    for path in paths:
        reader.read(path)
    return reader.build_tables()


class _LogReader:
    def __init__(self) -> None:
        self._decoders = {event: msgspec.json.Decoder(kind) for event, kind in LINE_TYPES.items()}
        self._name_decoder = msgspec.json.Decoder(_EventName)
        self._frames: dict[str, list[pl.DataFrame]] = {event: [] for event in LINE_TYPES}
        self._num_lines = 0
        self._unusable: list[str] = []

    def read(self, path: Path) -> None:
        lines_by_event: dict[str, list[LogLine]] = {event: [] for event in LINE_TYPES}
        for number, text in enumerate(read_bytes(path).splitlines(), start=1):
            self._num_lines += 1
            try:
                event = self._name_decoder.decode(text).event
                if event in lines_by_event:
                    lines_by_event[event].append(self._decode_line(event, text))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._unusable.append(f"{path}, line {number}: {error}")
        for event, lines in lines_by_event.items():
            if lines:
                self._frames[event].append(_build_table(event, lines, path.stem))

    def _decode_line(self, event: str, text: bytes) -> LogLine:
        line = self._decoders[event].decode(text)
        if line.timestamp.tzinfo is None:
            raise msgspec.ValidationError("the timestamp has no time zone")
        return line

    def build_tables(self) -> LogTables:
        full = {
            event: pl.concat(parts).sort("at", maintain_order=True) for event, parts in self._frames.items() if parts
        }
        began_at = min((frame["at"][0] for frame in full.values()), default=None)
        since = (pl.col("at") - began_at).dt.total_microseconds() / 1e6
        frames = {event: pl.DataFrame(schema=schema) for event, schema in _SCHEMAS.items()}
        frames |= {event: frame.with_columns(t=since).drop("at") for event, frame in full.items()}
        launches, launch_ends_s, paused_s = _remove_pauses(frames)
        launch = pl.sum_horizontal(pl.lit(0), *(pl.col("t") >= begin for begin in launches)).alias("launch")
        for event, field in _UNIQUE_BY.items():
            unique = frames[event].with_columns(launch).unique(["launch", field], keep="first", maintain_order=True)
            frames[event] = unique.drop("launch")
        end_s = max((float(frames[event]["t"][-1]) for event in full), default=0.0)
        unusable = len(self._unusable), self._unusable[:MAX_NAMED_UNUSABLE]
        return LogTables(frames, began_at, end_s, launch_ends_s, paused_s, self._num_lines, *unusable)


def _remove_pauses(frames: dict[str, pl.DataFrame]) -> tuple[Sequence[float], Sequence[float], float]:
    """Remove pauses. Return the launches' starts and ends, from the second start on, and the seconds of all pauses."""
    starts, ends, paused_s = list[float](), list[float](), 0.0
    for begin in frames["run.started"]["t"].to_list()[1:]:
        begin -= paused_s
        times = pl.concat([frame["t"] for event, frame in frames.items() if event != "run.started"])
        last = times.filter(times < begin).max()
        if isinstance(last, float):
            ends.append(last)
            pause_s = max(0.0, begin - last - _BETWEEN_LAUNCHES_S)
            shifted = pl.when(pl.col("t") >= begin).then(pl.col("t") - pause_s).otherwise(pl.col("t"))
            for event, frame in frames.items():
                frames[event] = frame.with_columns(t=shifted)
            paused_s += pause_s
            begin -= pause_s
        starts.append(begin)
    return starts, ends, paused_s


def _build_table(event: str, lines: Sequence[LogLine], process: str) -> pl.DataFrame:
    """Build a table of the lines, with their time as column `at`. A line without a process is of `process`."""
    schema = {name: dtype for name, dtype in _SCHEMAS[event].items() if name != "t"}
    columns: dict[str, list[Any]] = {name: [getattr(line, name) for line in lines] for name in schema}
    for name in columns.keys() & {"process", "engine"}:
        columns[name] = [value or process for value in columns[name]]
    if "engines" in columns:
        pairs = (each.items() for each in columns["engines"])
        columns["engines"] = [[{"engine": engine, "asked": count} for engine, count in each] for each in pairs]
    at = pl.Series("at", [line.timestamp for line in lines], dtype=pl.Datetime("us", "UTC"))
    return pl.DataFrame(columns, schema=schema).with_columns(at)
