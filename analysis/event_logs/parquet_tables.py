"""Exports event logs to Parquet: one row per event, and one per trajectory with its tokens."""

from collections.abc import Iterable, Iterator
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import numpy as np
import polars as pl

from asterism.analysis.event_logs.merged_events import EventFilter, MergedEvent, merge_events, read_start_time
from asterism.bus.messages import StartGroup, TrajectoryEnd, TrajectoryFinished
from asterism.configs.run_folder import RunFolder

TimeRange = tuple[float, float]  # seconds since the run's start, half-open
ALL_TIMES: TimeRange = (-inf, inf)
EVENTS_PER_PART, TRAJECTORIES_PER_PART = 100_000, 2_000

_EVENT_SCHEMA = {
    **{"process": pl.String, "seq": pl.Int64, "time": pl.Float64, "since_start_s": pl.Float64, "actor": pl.String},
    **{"sender": pl.String, "epoch": pl.Int64, "number": pl.Int64, "kind": pl.String, "trajectory": pl.Int64},
    **{"frame_bytes": pl.Int64, "message": pl.String},
}
_ARRAY_TYPES = {"token_ids": (np.int32, pl.Int32), "loss_mask": (np.uint8, pl.UInt8)} | {
    **{"logprobs": (np.float32, pl.Float32), "versions": (np.int32, pl.Int32)}
}
_COUNT_COLUMNS = (
    "prompt_tokens",
    "turns",
    "calls",
    "calls_failed",
    "responses_with_error",
    "answer_opens",
    "answer_closes",
    "answer_spans",
)
_DURATION_COLUMNS = ("lease_wait_s", "generation_s", "tools_s", "grading_s")
_TRAJECTORY_SCHEMA = {
    **{"trajectory_id": pl.Int64, "group_id": pl.Int64, "task": pl.String, "problem": pl.String},
    **{"ground_truth": pl.String, "purpose": pl.String, "ended": pl.String, "ended_at": pl.Float64, "cause": pl.String},
    **{"reward": pl.Float64, "components": pl.String, "ending": pl.String},
    **dict.fromkeys(_COUNT_COLUMNS, pl.Int64),
    **dict.fromkeys(_DURATION_COLUMNS, pl.Float64),
    **{name: pl.List(kind) for name, (_, kind) in _ARRAY_TYPES.items()},
}


def write_parquet(folder: RunFolder, output_folder: Path, time_range: TimeRange = ALL_TIMES) -> dict[str, int]:
    """Write the tables `events` and `trajectories`, and return their row counts.

    Each table is a folder of files of bounded size. Existing tables are replaced. Raises
    UnusableInput if there is no log. `time_range` selects events by time and trajectories by end.
    """
    return {
        "events": _write(
            _build_event_rows(folder, time_range), _EVENT_SCHEMA, EVENTS_PER_PART, output_folder / "events"
        ),
        "trajectories": _write(
            _build_trajectory_rows(folder, time_range),
            _TRAJECTORY_SCHEMA,
            TRAJECTORIES_PER_PART,
            output_folder / "trajectories",
        ),
    }


def _write(rows: Iterator[dict[str, Any]], schema: dict[str, Any], part_rows: int, output_folder: Path) -> int:
    output_folder.mkdir(parents=True, exist_ok=True)
    for previous in output_folder.glob("*.parquet"):
        previous.unlink()
    num_written = 0
    for part in range(1_000_000):
        chunk = list(islice(rows, part_rows))
        if part and not chunk:
            break
        pl.DataFrame(chunk, schema=schema).write_parquet(output_folder / f"{part:05}.parquet")
        num_written += len(chunk)
    return num_written


def _build_event_rows(folder: RunFolder, time_range: TimeRange) -> Iterator[dict[str, Any]]:
    start_time = read_start_time(folder)
    since, until = (start_time + each for each in time_range)
    for logged in merge_events(folder, EventFilter(since=since, until=until)):
        event = logged.event
        columns = {"process": logged.process, **event._asdict(), "since_start_s": event.time - start_time}
        message = msgspec.json.encode(extract_scalars(logged.envelope.message)).decode()
        yield {**columns, "frame_bytes": len(event.frame), "message": message} | {"frame": None}


def extract_scalars(message: msgspec.Struct) -> dict[str, Any]:
    """Return a message's fields by name without byte arrays; `is` holds the class of a nested struct."""
    return {
        name: _to_scalar(value)
        for name in message.__struct_fields__
        if not isinstance(value := getattr(message, name), bytes)
    }


def _to_scalar(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return {"is": type(value).__name__, **extract_scalars(value)}
    if isinstance(value, tuple | list):
        return [_to_scalar(part) for part in cast("Iterable[object]", value)]
    return value


def _build_trajectory_rows(folder: RunFolder, time_range: TimeRange) -> Iterator[dict[str, Any]]:
    """Yield one row per trajectory, in the order of their ends."""
    groups: dict[int, StartGroup] = {}
    since, until = (read_start_time(folder) + each for each in time_range)
    kinds = tuple(kind.__name__ for kind in (StartGroup, *get_args(TrajectoryEnd)))
    for logged in merge_events(folder, EventFilter(kinds=kinds)):
        message = logged.envelope.message
        if isinstance(message, StartGroup):
            groups[message.group_id] = message
        elif isinstance(message, TrajectoryEnd) and since <= logged.event.time < until:
            yield _build_trajectory_row(logged, message, groups.get(message.group_id))


def _build_trajectory_row(logged: MergedEvent, end: TrajectoryEnd, group: StartGroup | None) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(_TRAJECTORY_SCHEMA)
    row["ended"] = type(end).__name__.removeprefix("Trajectory").lower()
    row["ended_at"] = logged.event.time
    if group is not None:
        row |= {name: getattr(group, name) for name in ("task", "problem", "ground_truth", "purpose")}
    columns = msgspec.structs.asdict(end)
    if isinstance(end, TrajectoryFinished):
        columns |= {**msgspec.structs.asdict(end.record), "components": msgspec.json.encode(end.components).decode()}
    for name in columns.keys() & row.keys():
        row[name] = np.frombuffer(columns[name], _ARRAY_TYPES[name][0]) if name in _ARRAY_TYPES else columns[name]
    return row
