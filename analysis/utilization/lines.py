"""The lines of the structured logs that the report reads, and reading them. Other lines are passed over.

A line that is torn, or lacks a field that is read, is counted and named, and left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import polars as pl

from analysis.metrics import AnalysisError, read_bytes

NAMED = 3  # unusable lines that are named; the others are counted
# What is told of once in a launch of the run, and by which field: a process that goes on after a kill may tell it again.
_TOLD_ONCE = {
    "trajectory.ended": "trajectory_id",
    "group.started": "group_id",
    "step.requested": "name",
    "step.ended": "name",
}


class Line(msgspec.Struct, frozen=True, kw_only=True):
    timestamp: datetime  # with its zone
    process: str = ""  # the file's name, if the line has none


class RunStarted(Line, frozen=True, kw_only=True):
    step: int = 0  # that it goes on after


class EngineStarted(Line, frozen=True, kw_only=True):
    kv_tokens: int
    page_tokens: int


class EngineLoad(Line, frozen=True, kw_only=True):
    """As bus.messages.EngineLoadReported. Counters since the engine's start."""

    engine: str = ""  # the process, if the line has none
    running: int
    waiting: int
    used_tokens: int
    cached_tokens: int
    generated_tokens: int
    prefilled_tokens: int
    recomputed_tokens: int
    evicted_tokens: int
    preempted: int
    decode_steps: int
    busy_s: float


class WeightsLoaded(Line, frozen=True, kw_only=True):
    version: int
    load_s: float


class LedgerReported(Line, frozen=True, kw_only=True):
    """As bus.messages.LedgerReported."""

    engine: str
    leased_tokens: int
    usable_tokens: int


class ExecutorLoad(Line, frozen=True, kw_only=True):
    """As sandbox.gauge.SandboxLoad. Counters since the executor's start."""

    executor: str  # this life of it
    slots: int
    running: int
    queued: int
    done: int
    busy_s: float
    running_s: float
    queued_s: float


class TrajectoriesCounted(Line, frozen=True, kw_only=True):
    """How many live trajectories of a rollout process are in which phase."""

    leasing: int
    generating: int
    calling: int
    grading: int
    engines: dict[str, int]  # of those that generate; an engine without any may be left out


class TrajectoryEnded(Line, frozen=True, kw_only=True):
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


class StepRequested(Line, frozen=True, kw_only=True):
    name: str  # "step 3", "evaluation start_greedy"


class GroupStarted(Line, frozen=True, kw_only=True):
    name: str  # of the step
    group_id: int
    size: int


class StepEnded(Line, frozen=True, kw_only=True):
    """The parts of a step follow one another; an evaluation has none."""

    name: str
    step_s: float | None = None
    rollout_s: float | None = None
    train_s: float | None = None
    weights_s: float | None = None


KINDS: Mapping[str, type[Line]] = {
    "run.started": RunStarted,
    "engine.started": EngineStarted,
    "engine.load": EngineLoad,
    "weights.loaded": WeightsLoaded,
    "ledger.reported": LedgerReported,
    "executor.load": ExecutorLoad,
    "trajectories.counted": TrajectoriesCounted,
    "trajectory.ended": TrajectoryEnded,
    "step.requested": StepRequested,
    "group.started": GroupStarted,
    "step.ended": StepEnded,
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
    for event, kind in KINDS.items()
}


class _Named(msgspec.Struct, frozen=True):
    event: str = ""


class Lines(NamedTuple):
    """`frames` has a table for each of KINDS, in order of time; its column `t` is seconds since `began_at`."""

    frames: Mapping[str, pl.DataFrame]
    began_at: datetime | None  # of the earliest line that is read
    end_s: float  # of the latest, since then
    deaths: Sequence[float]  # when the run was last heard of in each launch of it that another one followed
    num_lines: int
    num_unusable: int
    unusable: Sequence[str]  # the first of them: file, line, cause


def read_lines(logs: Path) -> Lines:
    """All `*.jsonl` of a folder. Raises AnalysisError if there are none."""
    paths = sorted(logs.glob("*.jsonl"))
    if not paths:
        raise AnalysisError(f"{logs}: there are no logs (no *.jsonl) to report on; is {logs.parent} a run's folder?")
    reader = _Reader()
    for path in paths:
        reader.read(path)
    return reader.lines()


class _Reader:
    def __init__(self) -> None:
        self._decoders = {event: msgspec.json.Decoder(kind) for event, kind in KINDS.items()}
        self._name = msgspec.json.Decoder(_Named)
        self._frames: dict[str, list[pl.DataFrame]] = {event: [] for event in KINDS}
        self._num_lines = 0
        self._unusable: list[str] = []

    def read(self, path: Path) -> None:
        kept: dict[str, list[Line]] = {event: [] for event in KINDS}
        for number, text in enumerate(read_bytes(path).splitlines(), start=1):
            self._num_lines += 1
            try:
                event = self._name.decode(text).event
                if event in kept:
                    kept[event].append(self._line(event, text))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._unusable.append(f"{path}, line {number}: {error}")
        for event, lines in kept.items():
            if lines:
                self._frames[event].append(_frame(event, lines, path.stem))

    def _line(self, event: str, text: bytes) -> Line:
        line = self._decoders[event].decode(text)
        if line.timestamp.tzinfo is None:
            raise msgspec.ValidationError("the timestamp has no zone")
        return line

    def lines(self) -> Lines:
        full = {
            event: pl.concat(parts).sort("at", maintain_order=True) for event, parts in self._frames.items() if parts
        }
        began_at = min((frame["at"][0] for frame in full.values()), default=None)
        since = (pl.col("at") - began_at).dt.total_microseconds() / 1e6
        frames = {event: pl.DataFrame(schema=schema) for event, schema in _SCHEMAS.items()}
        frames |= {event: frame.with_columns(t=since).drop("at") for event, frame in full.items()}
        launches = frames["run.started"]["t"].to_list()[1:]
        launch = pl.sum_horizontal(pl.lit(0), *(pl.col("t") >= begin for begin in launches)).alias("launch")
        for event, field in _TOLD_ONCE.items():
            told = frames[event].with_columns(launch).unique(["launch", field], keep="first", maintain_order=True)
            frames[event] = told.drop("launch")
        end_s = max((float(frames[event]["t"][-1]) for event in full), default=0.0)
        unusable = len(self._unusable), self._unusable[:NAMED]
        return Lines(frames, began_at, end_s, _deaths(frames), self._num_lines, *unusable)


def _deaths(frames: Mapping[str, pl.DataFrame]) -> Sequence[float]:
    begins = frames["run.started"]["t"].to_list()[1:]
    times = pl.concat([frame["t"] for event, frame in frames.items() if event != "run.started"])
    heard = [times.filter(times < begin).max() for begin in begins]
    return [float(last) for last in heard if isinstance(last, float)]


def _frame(event: str, lines: Sequence[Line], process: str) -> pl.DataFrame:
    """The lines as a table; `at` is the time. Fields that name an engine or a process are never empty."""
    schema = {name: dtype for name, dtype in _SCHEMAS[event].items() if name != "t"}
    columns: dict[str, list[Any]] = {name: [getattr(line, name) for line in lines] for name in schema}
    for name in columns.keys() & {"process", "engine"}:
        columns[name] = [value or process for value in columns[name]]
    if "engines" in columns:
        pairs = (each.items() for each in columns["engines"])
        columns["engines"] = [[{"engine": engine, "asked": count} for engine, count in each] for each in pairs]
    at = pl.Series("at", [line.timestamp for line in lines], dtype=pl.Datetime("us", "UTC"))
    return pl.DataFrame(columns, schema=schema).with_columns(at)
