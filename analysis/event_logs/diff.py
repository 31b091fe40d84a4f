"""Finds the divergences of two runs: in the contents of their decisions, or byte for byte."""

from collections.abc import Container, Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple

from asterism.analysis.event_logs.comparable_events import ComparableEvent, read_event_streams, strip_times
from asterism.analysis.event_logs.merged_events import read_start_time
from asterism.bus.codec import encode
from asterism.bus.event_log.reader import decode_event, read_events
from asterism.bus.messages import Envelope
from asterism.configs.run_folder import RunFolder


class RunDivergence(NamedTuple):
    """The first differing event of a stream. `a` or `b` is None if that run has no event there."""

    stream: str  # "trajectory 7", "step 3", "head"
    a: ComparableEvent | None
    b: ComparableEvent | None

    @property
    def at_s(self) -> float:
        """The earlier of the two times, in seconds since the start of its run."""
        return self.times[0]

    @property
    def times(self) -> tuple[float, float]:
        """The times of both events in ascending order; twice the same time if only one run has the event."""
        times = [event.at_s for event in (self.a, self.b) if event is not None]
        return min(times), max(times)


def find_first_divergence(a: RunFolder, b: RunFolder, *, exact: bool = False) -> RunDivergence | None:
    """Return the first divergence, or None if the runs are equal. Raises UnusableInput."""
    return next(iter(list_divergences(a, b, exact=exact)), None)


def list_divergences(a: RunFolder, b: RunFolder, *, exact: bool = False) -> list[RunDivergence]:
    """Return the first divergence of each stream, in an order that does not depend on which run is A.

    In each run, a cause precedes its consequences. The divergences are therefore sorted by the earlier
    of their two times, and the cause is the first.

    `exact`: also compares the events of each process in order, byte for byte except for times and
    durations. Raises UnusableInput.
    """
    streams_a, streams_b = read_event_streams(a), read_event_streams(b)
    names = {path.stem for folder in (a, b) for path in folder.events.glob("*.sqlite")} if exact else ()
    exact_streams = [(name, _read_exact_events(name, a), _read_exact_events(name, b)) for name in sorted(names)]
    streams = [(name, streams_a.get(name, ()), streams_b.get(name, ())) for name in {**streams_a, **streams_b}]
    divergences = (_compare_stream(*stream) for stream in (*exact_streams, *streams))
    return sorted((each for each in divergences if each is not None), key=lambda each: _get_sort_key(each, names))


def _get_sort_key(divergence: RunDivergence, processes: Container[str]) -> tuple[object, ...]:
    """Return the sort key: the times, and at equal times processes first and files last."""
    name = divergence.stream
    is_file = name.startswith(("metrics, ", "checkpoint "))
    return *divergence.times, name not in processes, is_file, name


def _compare_stream(name: str, a: Iterable[ComparableEvent], b: Iterable[ComparableEvent]) -> RunDivergence | None:
    for ours, theirs in zip_longest(a, b):
        if ours is None or theirs is None or not _is_same(ours, theirs):
            return RunDivergence(name, ours, theirs)
    return None


def _is_same(a: ComparableEvent, b: ComparableEvent) -> bool:
    if "bytes" in a.contents:
        return a.contents["bytes"] == b.contents["bytes"]
    # repr, because nan is not equal to itself.
    return a.label == b.label and (a.contents == b.contents or repr(a.contents) == repr(b.contents))


def _read_exact_events(process: str, folder: RunFolder) -> Iterator[ComparableEvent]:
    path = folder.events / f"{process}.sqlite"
    if not path.exists():
        return
    start_time = read_start_time(folder)
    for event, _ in read_events(path):
        envelope = decode_event(path, event)
        message = strip_times(envelope.message)
        contents: dict[str, object] = {name: getattr(message, name) for name in message.__struct_fields__}
        contents["bytes"] = encode(Envelope(envelope.sender, envelope.to, message))
        label = f"{event.kind} from {envelope.sender} to {envelope.to}"
        yield ComparableEvent(event.time - start_time, label, contents, f"{process}:{event.seq}")


def list_differing_fields(divergence: RunDivergence) -> list[str]:
    """Return the names of the fields that differ, or all names if only one run has the event."""
    a, b = (event.contents if event is not None else {} for event in (divergence.a, divergence.b))
    return [name for name in {**a, **b} if name != "bytes" and repr(a.get(name)) != repr(b.get(name))]
