"""Checks that a Chrome trace is valid."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    ph: str
    pid: int
    tid: int
    ts: float | None = None
    name: str | None = None
    args: dict[str, Any] | None = None


class _Trace(msgspec.Struct, forbid_unknown_fields=True):
    displayTimeUnit: str
    traceEvents: list[_Record]


def checked_slices(file: Path) -> dict[str, list[tuple[str, float, float, int]]]:
    """Return the slices of each `process/track` as name, begin and end in microseconds, and depth.
    Assert that slices nest or do not overlap, that every slice ends, and that each track has a name."""
    trace = msgspec.json.decode(file.read_bytes(), type=_Trace)
    names: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    open_: defaultdict[tuple[int, int], list[tuple[str, float]]] = defaultdict(list)
    last: dict[tuple[int, int], float] = {}
    slices: defaultdict[tuple[int, int], list[tuple[str, float, float, int]]] = defaultdict(list)
    for record in trace.traceEvents:
        track = record.pid, record.tid
        match record:
            case _Record(ph="M", name="process_name", args={"name": str(name)}):
                processes[record.pid] = name
            case _Record(ph="M", name="thread_name", args={"name": str(name)}):
                names[track] = name
            case _Record(ph="M", name="process_sort_index", args={"sort_index": int()}):
                pass
            case _Record(ph="B", ts=float(ts), name=str(name), args=None):
                assert ts >= last.get(track, 0.0)
                last[track] = ts
                open_[track].append((name, ts))
            case _Record(ph="E", ts=float(ts), name=None, args=None):
                assert ts >= last[track]
                last[track] = ts
                name, begin = open_[track].pop()
                slices[track].append((name, begin, ts, len(open_[track])))
            case _:
                raise AssertionError(record)
    assert not any(open_.values())
    return {f"{processes[track[0]]}/{names[track]}": each for track, each in slices.items()}
