"""Exports event logs as a Chrome trace for Perfetto (ui.perfetto.dev).

The spans of one track nest or do not overlap. Trajectories, turns of an engine, calls of an executor and steps of an
asynchronous run overlap and need several tracks. A track shows trajectories one after another, each with
its phases, so that a run has as many tracks as it had trajectories at the same time.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asterism.analysis.event_logs.spans import LEARNER, STEPS, TRAJECTORIES, TraceSpan

_TRACK_ORDER = (STEPS, LEARNER)  # then engines and executors by name, then trajectories
TraceRecord = dict[str, Any]


def write_chrome_trace(spans: Sequence[TraceSpan], file: Path) -> int:
    """Write one JSON object, and return the number of spans. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, record in enumerate(build_trace_records(spans)):
            out.write((b",\n" if number else b"") + msgspec.json.encode(record))
        out.write(b"\n]}\n")
    return len(spans)


def build_trace_records(spans: Iterable[TraceSpan]) -> Iterator[TraceRecord]:
    """Yield the records, grouped by track and sorted by time."""
    groups: defaultdict[str, list[TraceSpan]] = defaultdict(list)
    for each in spans:
        groups[each.track].append(each)
    for process, (name, group) in enumerate(sorted(groups.items(), key=_get_sort_key), start=1):
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
        for thread, (label, track) in enumerate(_split_tracks(name, group), start=1):
            yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": label}}
            yield from _emit_nested_spans(track, process, thread)


def _get_sort_key(group: tuple[str, list[TraceSpan]]) -> tuple[int, str]:
    name = group[0]
    return (_TRACK_ORDER.index(name) if name in _TRACK_ORDER else len(_TRACK_ORDER) + (name == TRAJECTORIES)), name


def _split_tracks(name: str, group: list[TraceSpan]) -> Iterator[tuple[str, list[TraceSpan]]]:
    is_joined = name == TRAJECTORIES
    blocks = _join_trajectories(group) if is_joined else [_Block(each.start_s, each.end_s, [each]) for each in group]
    for number, track in enumerate(_pack_tracks(blocks)):
        yield f"lane {number}" if is_joined else f"{name} #{number}", [span for each in track for span in each.parts]


class _Block(NamedTuple):
    """Spans that stay on one track: a trajectory with its phases, or a single span."""

    start_s: float
    end_s: float
    parts: list[TraceSpan]


def _join_trajectories(group: list[TraceSpan]) -> list[_Block]:
    """Join the spans of each trajectory, also those of several launches of a resumed run with the same number."""
    by_trajectory: defaultdict[int | None, list[TraceSpan]] = defaultdict(list)
    for each in group:
        by_trajectory[each.trajectory].append(each)
    return [
        _Block(min(each.start_s for each in parts), max(each.end_s for each in parts), parts)
        for parts in by_trajectory.values()
    ]


def _pack_tracks(blocks: Sequence[_Block]) -> list[list[_Block]]:
    """Distribute blocks over as few tracks as possible; a block goes to the track that has been free longest."""
    tracks: list[list[_Block]] = []
    free: list[tuple[float, int]] = []  # (free since, track)
    for each in sorted(blocks, key=lambda each: (each.start_s, each.end_s)):
        if free and free[0][0] <= each.start_s:
            _, number = heapq.heappop(free)
        else:
            number = len(tracks)
            tracks.append([])
        tracks[number].append(each)
        heapq.heappush(free, (each.end_s, number))
    return tracks


def _emit_nested_spans(track: list[TraceSpan], process: int, thread: int) -> Iterator[TraceRecord]:
    """Emit begin and end records; a nested span begins after its parent and ends before it."""
    place = {"pid": process, "tid": thread}
    open_: list[TraceSpan] = []

    def end(span: TraceSpan) -> TraceRecord:
        return {"ph": "E", "ts": _to_microseconds(span.end_s), **place}

    for each in sorted(track, key=lambda each: (each.start_s, -each.end_s)):
        while open_ and open_[-1].end_s <= each.start_s:
            yield end(open_.pop())
        yield {"ph": "B", "ts": _to_microseconds(each.start_s), "name": each.name, **place}
        open_.append(each)
    while open_:
        yield end(open_.pop())


def _to_microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
