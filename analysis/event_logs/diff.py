"""Where two runs part: by what was decided on, or exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from analysis.event_logs.merging import began_at
from analysis.event_logs.moments import Moment, Thread, threads_of, without_times
from bus.codec import encode
from bus.event_reading import envelope_of, read_events
from bus.messages import Envelope
from configs.errors import UnusableInput
from configs.run_folder import RunFolder


class Parting(NamedTuple):
    """The first that differs. A side that has nothing there is None."""

    of: str  # "trajectory 7", "step 3", "head"
    a: Moment | None
    b: Moment | None

    @property
    def at(self) -> float:
        """In run A's time, as far as A has it."""
        there = self.a or self.b
        assert there is not None
        return there.at


def parting(a: RunFolder, b: RunFolder) -> Parting | None:
    """The first in the order of run A's time; None if every thread of moments is the same. Raises UnusableInput."""
    threads_a, threads_b = threads_of(a), threads_of(b)
    partings = (
        _parting(thread, threads_a.get(thread, []), threads_b.get(thread, [])) for thread in {**threads_a, **threads_b}
    )
    return min((each for each in partings if each is not None), key=lambda each: each.at, default=None)


def _parting(thread: Thread, a: Sequence[Moment], b: Sequence[Moment]) -> Parting | None:
    what, number, life = thread
    name = f"{what} {number}" if number or what == "trajectory" else what
    again = f", start {life}" if life > 1 else ""
    for ours, theirs in zip_longest(a, b):
        if ours is None or theirs is None or not _same(ours, theirs):
            return Parting(name + again, ours, theirs)
    return None


def _same(a: Moment, b: Moment) -> bool:
    return a.what == b.what and (a.contents == b.contents or repr(a.contents) == repr(b.contents))  # nan is not nan


def exact_parting(a: RunFolder, b: RunFolder) -> Parting | None:
    """The first event, in each process's own order, that is not the same byte for byte, times and durations apart."""
    names = sorted({path.stem for folder in (a, b) for path in folder.events.glob("*.sqlite")})
    if not names:
        raise UnusableInput(f"{a.events}, {b.events}: there are no event logs")
    partings = (_exact_parting(name, a, b) for name in names)
    return min((each for each in partings if each is not None), key=lambda each: each.at, default=None)


def _exact_parting(process: str, a: RunFolder, b: RunFolder) -> Parting | None:
    for ours, theirs in zip_longest(_exact(process, a), _exact(process, b)):
        if ours is None or theirs is None or ours.contents["bytes"] != theirs.contents["bytes"]:
            return Parting(process, ours, theirs)
    return None


def _exact(process: str, folder: RunFolder) -> Iterator[Moment]:
    path = folder.events / f"{process}.sqlite"
    if not path.exists():
        return
    began = began_at(folder)
    for event, _ in read_events(path):
        envelope = envelope_of(path, event)
        message = without_times(envelope.message)
        contents: dict[str, object] = {name: getattr(message, name) for name in message.__struct_fields__}
        contents["bytes"] = encode(Envelope(envelope.sender, envelope.to, message))
        what = f"{event.kind} from {envelope.sender} to {envelope.to}"
        yield Moment(event.time - began, what, contents, f"{process}:{event.seq}")


def differing(parting: Parting) -> list[str]:
    """Names of the contents that are not the same; all of them where one side has nothing."""
    a, b = (moment.contents if moment is not None else {} for moment in (parting.a, parting.b))
    return [name for name in {**a, **b} if name != "bytes" and repr(a.get(name)) != repr(b.get(name))]
