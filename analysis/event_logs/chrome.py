"""Event logs as a Chrome trace, for Perfetto (ui.perfetto.dev): tracks of slices that nest or do not overlap.

Each trajectory has a track: the whole of it, and its phases in that. An engine's turns overlap, and so do an executor's
calls and the steps of a run whose rollouts run ahead: they lie on as many tracks as it takes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from analysis.event_logs.slices import LEARNER, STEPS, TRAJECTORIES, Slice

_ORDER = (STEPS, LEARNER)  # then engines and executors by name, then trajectories
Record = dict[str, Any]


def write_chrome(slices: Sequence[Slice], file: Path) -> int:
    """One JSON object; how many slices it has."""
    with file.open("wb") as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, record in enumerate(trace_of(slices)):
            out.write((b",\n" if number else b"") + msgspec.json.encode(record))
        out.write(b"\n]}\n")
    return len(slices)


def trace_of(slices: Iterable[Slice]) -> Iterator[Record]:
    """The records, those of one track together and in their order."""
    groups: defaultdict[str, list[Slice]] = defaultdict(list)
    for each in slices:
        groups[each.track].append(each)
    for process, (name, group) in enumerate(sorted(groups.items(), key=_place), start=1):
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
        for thread, (label, track) in enumerate(_tracks(name, group), start=1):
            yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": label}}
            yield from _nested(track, process, thread)


def _place(group: tuple[str, list[Slice]]) -> tuple[int, str]:
    name = group[0]
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER) + (name == TRAJECTORIES)), name


def _tracks(name: str, group: list[Slice]) -> Iterator[tuple[str, list[Slice]]]:
    if name == TRAJECTORIES:
        by_trajectory: defaultdict[int | None, list[Slice]] = defaultdict(list)
        for each in group:
            by_trajectory[each.trajectory].append(each)
        for trajectory, track in sorted(by_trajectory.items(), key=lambda pair: pair[0] or 0):
            yield f"trajectory {trajectory}", track
    else:
        for number, track in enumerate(_side_by_side(group)):
            yield f"{name} #{number}", track


def _side_by_side(group: list[Slice]) -> list[list[Slice]]:
    """As few tracks as it takes; a slice goes to the one that has been free for longest."""
    tracks: list[list[Slice]] = []
    free: list[tuple[float, int]] = []  # since when, and which
    for each in sorted(group, key=lambda each: (each.begin, each.end)):
        if free and free[0][0] <= each.begin:
            _, number = heapq.heappop(free)
        else:
            number = len(tracks)
            tracks.append([])
        tracks[number].append(each)
        heapq.heappush(free, (each.end, number))
    return tracks


def _nested(track: list[Slice], process: int, thread: int) -> Iterator[Record]:
    """Begin and end of each; a slice that lies in another one begins after it and ends before it."""
    place = {"pid": process, "tid": thread}
    open_: list[Slice] = []

    def end(slice_: Slice) -> Record:
        return {"ph": "E", "ts": _microseconds(slice_.end), **place}

    for each in sorted(track, key=lambda each: (each.begin, -each.end)):
        while open_ and open_[-1].end <= each.begin:
            yield end(open_.pop())
        yield {"ph": "B", "ts": _microseconds(each.begin), "name": each.name, **place}
        open_.append(each)
    while open_:
        yield end(open_.pop())


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
