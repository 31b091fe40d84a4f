"""Event logs as Parquet: a row an event, and a row a trajectory with its tokens. Written in parts of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import polars as pl

from analysis.event_logs.merging import Choice, Logged, began_at, merged
from bus.messages import StartGroup, TrajectoryAborted, TrajectoryFailed, TrajectoryFinished
from configs.run_folder import RunFolder

EVENTS_A_PART, TRAJECTORIES_A_PART = 100_000, 2_000
_ENDS = (TrajectoryFinished, TrajectoryFailed, TrajectoryAborted)

_EVENT = {
    **{"process": pl.String, "seq": pl.Int64, "time": pl.Float64, "since_start_s": pl.Float64, "actor": pl.String},
    **{"sender": pl.String, "session": pl.Int64, "number": pl.Int64, "kind": pl.String, "trajectory": pl.Int64},
    **{"frame_bytes": pl.Int64, "message": pl.String},
}
_ARRAYS = {"token_ids": (np.int32, pl.Int32), "loss_mask": (np.uint8, pl.UInt8)} | {
    **{"logprobs": (np.float32, pl.Float32), "versions": (np.int32, pl.Int32)}
}
_COUNTS = ("prompt_tokens", "turns", "calls", "calls_failed", "responses_with_error", "answer_opens", "answer_closes")
_WAITS = ("lease_wait_s", "generation_s", "tools_s", "grading_s")
_TRAJECTORY = {
    **{"trajectory_id": pl.Int64, "group_id": pl.Int64, "problem": pl.String, "ground_truth": pl.String},
    **{"purpose": pl.String, "ended": pl.String, "ended_at": pl.Float64, "cause": pl.String},
    **{"reward": pl.Float64, "ending": pl.String},
    **dict.fromkeys(_COUNTS, pl.Int64),
    **dict.fromkeys(_WAITS, pl.Float64),
    **{name: pl.List(kind) for name, (_, kind) in _ARRAYS.items()},
}


def write_parquet(folder: RunFolder, into: Path) -> dict[str, int]:
    """`into/events` and `into/trajectories`, each of as many files as it takes; how many rows each has. What is there
    already is replaced. Raises UnusableInput if there is no log."""
    return {
        "events": _write(_events(folder), _EVENT, EVENTS_A_PART, into / "events"),
        "trajectories": _write(_trajectories(folder), _TRAJECTORY, TRAJECTORIES_A_PART, into / "trajectories"),
    }


def _write(rows: Iterator[dict[str, Any]], schema: dict[str, Any], part_rows: int, into: Path) -> int:
    into.mkdir(parents=True, exist_ok=True)
    for former in into.glob("*.parquet"):
        former.unlink()
    written = 0
    for part in range(1_000_000):
        chunk = list(islice(rows, part_rows))
        if part and not chunk:
            break
        pl.DataFrame(chunk, schema=schema).write_parquet(into / f"{part:05}.parquet")
        written += len(chunk)
    return written


def _events(folder: RunFolder) -> Iterator[dict[str, Any]]:
    began = began_at(folder)
    for logged in merged(folder):
        event = logged.event
        columns = {"process": logged.process, **event._asdict(), "since_start_s": event.time - began}
        message = msgspec.json.encode(scalars(logged.envelope.message)).decode()
        yield {**columns, "frame_bytes": len(event.frame), "message": message} | {"frame": None}


def scalars(message: msgspec.Struct) -> dict[str, Any]:
    """A message's fields by name, without what is bytes; of a part that may be one of several, which it is."""
    return {
        name: _scalar(value)
        for name in message.__struct_fields__
        if not isinstance(value := getattr(message, name), bytes)
    }


def _scalar(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return {"is": type(value).__name__, **scalars(value)}
    if isinstance(value, tuple | list):
        return [_scalar(part) for part in cast("Iterable[object]", value)]
    return value


def _trajectories(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """In the order in which they ended."""
    groups: dict[int, StartGroup] = {}
    kinds = tuple(kind.__name__ for kind in (StartGroup, *_ENDS))
    for logged in merged(folder, Choice(kinds=kinds)):
        message = logged.envelope.message
        if isinstance(message, StartGroup):
            groups[message.group_id] = message
        elif isinstance(message, TrajectoryFinished | TrajectoryFailed | TrajectoryAborted):
            yield _row(logged, message, groups.get(message.group_id))


def _row(
    logged: Logged, end: TrajectoryFinished | TrajectoryFailed | TrajectoryAborted, group: StartGroup | None
) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(_TRAJECTORY)
    row["ended"] = type(end).__name__.removeprefix("Trajectory").lower()
    row["ended_at"] = logged.event.time
    if group is not None:
        row |= {name: getattr(group, name) for name in ("problem", "ground_truth", "purpose")}
    for name in end.__struct_fields__:
        if name in _ARRAYS:
            row[name] = np.frombuffer(getattr(end, name), _ARRAYS[name][0])
        elif name in row:
            row[name] = getattr(end, name)
    return row
