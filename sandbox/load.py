"""Load on a sandbox, and what came of it: how often each call was answered, how fast, and what was wrong.

closed_loop(sandbox, probes, in_flight)   so many callers; each asks for its next call when it has its answer
burst(sandbox, probes)                    all at once
Tally                                     the count itself, also of answers that come as messages
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from bus.messages import CodeOk, CodeOutcome, CodeOutOfMemory, CodeRequested, CodeTimedOut
from sandbox.contract import CodeResult, SandboxFailure

CallId = tuple[int, int]  # trajectory, call
PRINT, NUMPY, SYMPY, CELL = "print", "numpy", "sympy", "cell"
FORKED_CELL = "forked_cell"  # not plain (sandbox.inside.plain_cells): the state before it is kept by a fork
LOOP, HOG, MEGABYTE = "loop", "hog", "megabyte"  # an endless loop, all memory, much output
CODE = {
    PRINT: "print(1+1)",
    NUMPY: "import numpy as np; print(np.arange(1000).sum())",
    SYMPY: 'import sympy; x = sympy.Symbol("x"); print(sympy.solve(x**2 - 5*x + 6, x))',
    CELL: "1+1",
    FORKED_CELL: "import math\nmath.gcd(12, 18)",
    LOOP: "while True: pass",
    HOG: "blocks = []\nwhile True: blocks.append(bytearray(b'x') * (1 << 20))",
    MEGABYTE: "print('x' * 1_000_000)",
}


class Runs(Protocol):
    """What load is put on: a sandbox, or one behind the bus."""

    async def run(self, call: CodeRequested) -> CodeResult: ...


class Probe(msgspec.Struct, frozen=True):
    """A call, and which answers to it are right."""

    kind: str
    call: CodeRequested
    accepts: Callable[[CodeOutcome], bool]

    @property
    def call_id(self) -> CallId:
        return self.call.trajectory_id, self.call.call


class Figures(msgspec.Struct, frozen=True):
    submitted: int
    answered: int  # calls with an outcome, each once, right or wrong
    duplicates: int  # answers beyond a call's first
    overtaken: int  # answers that came before an earlier cell's of the same notebook
    failures: dict[str, int]  # by cause: what the infrastructure said, wrong outcomes, calls without any answer
    elapsed_s: float  # from the first call to the last call's first answer
    latencies_ms: Sequence[float]  # of the calls with an outcome, ascending

    @property
    def per_s(self) -> float:
        return self.answered / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def p50_ms(self) -> float:
        return percentile(self.latencies_ms, 50)

    @property
    def p99_ms(self) -> float:
        return percentile(self.latencies_ms, 99)


def percentile(ascending: Sequence[float], percent: int) -> float:
    """The smallest value that `percent` of all do not exceed; 0 of none."""
    return ascending[max(0, -(-len(ascending) * percent // 100) - 1)] if ascending else 0.0


class _Record:
    """One call. `cause` is what is wrong with its first answer, None if nothing is."""

    __slots__ = ("answered_at", "asked_at", "cause", "has_outcome", "probe")

    def __init__(self, probe: Probe, asked_at: float) -> None:
        self.probe = probe
        self.asked_at = asked_at
        self.answered_at: float | None = None
        self.has_outcome = False
        self.cause: str | None = "no answer"


class Tally:
    """Calls by trajectory and number, and all answers to them. Times are in seconds, of one clock."""

    def __init__(self) -> None:
        self._records: dict[CallId, _Record] = {}
        self._duplicates: Counter[str] = Counter()  # by kind
        self._overtaken: Counter[str] = Counter()
        self._last_cell: dict[int, int] = {}  # of a trajectory, the highest number that is answered
        self._strangers = 0
        self.unanswered = 0  # calls that have no answer yet

    def asked(self, probe: Probe, now: float) -> None:
        """Raises ValueError for a second call of the same trajectory and number."""
        if probe.call_id in self._records:
            raise ValueError(f"call {probe.call_id} was made twice")
        self._records[probe.call_id] = _Record(probe, now)
        self.unanswered += 1

    def finished(self, call_id: CallId, outcome: CodeOutcome, now: float) -> None:
        record = self._first_answer(call_id, now)
        if record is None:
            return
        record.has_outcome = True
        record.cause = None if record.probe.accepts(outcome) else f"{record.probe.kind}: {type(outcome).__name__}"
        if record.probe.call.tool == "jupyter_code":
            self._note_order(record.probe)

    def failed(self, call_id: CallId, cause: str, now: float) -> None:
        """The infrastructure's word for a call."""
        record = self._first_answer(call_id, now)
        if record is not None:
            record.cause = cause

    def figures(self, kind: str | None = None) -> Figures:
        """Of all calls, or of one kind's."""
        records = [record for record in self._records.values() if kind in (None, record.probe.kind)]
        ended = [record.answered_at for record in records if record.answered_at is not None]
        causes = Counter(record.cause for record in records if record.cause is not None)
        if kind is None and self._strangers:
            causes["an answer to no call"] = self._strangers
        return Figures(
            submitted=len(records),
            answered=sum(record.has_outcome for record in records),
            duplicates=_of(self._duplicates, kind),
            overtaken=_of(self._overtaken, kind),
            failures=dict(causes),
            elapsed_s=max(ended) - min(record.asked_at for record in records) if ended else 0.0,
            latencies_ms=sorted(
                1000 * (record.answered_at - record.asked_at)
                for record in records
                if record.has_outcome and record.answered_at is not None
            ),
        )

    def _first_answer(self, call_id: CallId, now: float) -> _Record | None:
        record = self._records.get(call_id)
        if record is None:
            self._strangers += 1
            return None
        if record.answered_at is not None:
            self._duplicates[record.probe.kind] += 1
            return None
        record.answered_at = now
        self.unanswered -= 1
        return record

    def _note_order(self, probe: Probe) -> None:
        last = self._last_cell.get(probe.call.trajectory_id, -1)
        if probe.call.call < last:
            self._overtaken[probe.kind] += 1
        self._last_cell[probe.call.trajectory_id] = max(last, probe.call.call)


def _of(counts: Counter[str], kind: str | None) -> int:
    return counts.total() if kind is None else counts[kind]


# ---------------------------------------------------------------- loads


async def closed_loop(sandbox: Runs, probes: Iterable[Probe], in_flight: int) -> Tally:
    tally = Tally()
    left = iter(probes)

    async def caller() -> None:
        for probe in left:
            await _ask(sandbox, probe, tally)

    await asyncio.gather(*[caller() for _ in range(in_flight)])
    return tally


async def burst(sandbox: Runs, probes: Sequence[Probe]) -> Tally:
    return await closed_loop(sandbox, probes, len(probes))


def for_seconds(probes: Iterable[Probe], seconds: float) -> Iterator[Probe]:
    """Of the probes those that are asked for within so many seconds of the first."""
    end: float | None = None
    for probe in probes:
        now = time.perf_counter()
        end = end or now + seconds
        if now > end:
            return
        yield probe


async def _ask(sandbox: Runs, probe: Probe, tally: Tally) -> None:
    tally.asked(probe, time.perf_counter())
    try:
        result = await sandbox.run(probe.call)
    except SandboxFailure as error:
        tally.failed(probe.call_id, str(error), time.perf_counter())
    else:
        tally.finished(probe.call_id, result.outcome, time.perf_counter())


# ---------------------------------------------------------------- probes


def programs(kind: str, trajectories: Iterable[int]) -> Iterator[Probe]:
    """Stateless calls, each of a trajectory of its own."""
    for trajectory in trajectories:
        call = CodeRequested(trajectory, 0, "python_code_with_standard_io", CODE[kind], "")
        yield Probe(kind, call, _ACCEPTS[kind])


def numbered_programs(trajectories: Iterable[int]) -> Iterator[Probe]:
    """Each prints its own number, so that an answer that belongs to another call is a wrong one."""
    for trajectory in trajectories:
        call = CodeRequested(trajectory, 0, "python_code_with_standard_io", f"print({trajectory})", "")
        yield Probe(PRINT, call, _prints(f"{trajectory}\n"))


def cells(kind: str, notebooks: Sequence[int], calls: Iterable[int]) -> Iterator[Probe]:
    """Notebooks' cells: a round of all notebooks after the other."""
    for call in calls:
        for notebook in notebooks:
            yield Probe(kind, CodeRequested(notebook, call, "jupyter_code", CODE[kind], ""), _ACCEPTS[kind])


def mixture(healthy: int, seed: int = 0) -> list[Probe]:
    """So many healthy prints, and beside them 2% endless loops, 2% memory hogs and 1% megabyte outputs; shuffled."""
    total = round(healthy / 0.95)
    counts = {PRINT: healthy, LOOP: round(total * 0.02), HOG: round(total * 0.02), MEGABYTE: round(total * 0.01)}
    probes: list[Probe] = []
    for kind, count in counts.items():
        probes += programs(kind, range(len(probes), len(probes) + count))
    random.Random(seed).shuffle(probes)
    return probes


def _prints(text: str) -> Callable[[CodeOutcome], bool]:
    return lambda outcome: isinstance(outcome, CodeOk) and outcome.output.stdout == text


def _megabyte(outcome: CodeOutcome) -> bool:
    return isinstance(outcome, CodeOk) and len(outcome.output.stdout) + outcome.output.stdout_cut == 1_000_001


_ACCEPTS: dict[str, Callable[[CodeOutcome], bool]] = {
    PRINT: _prints("2\n"),
    NUMPY: _prints("499500\n"),
    SYMPY: _prints("[2, 3]\n"),
    CELL: _prints("2\n"),
    FORKED_CELL: _prints("6\n"),
    LOOP: lambda outcome: isinstance(outcome, CodeTimedOut),
    HOG: lambda outcome: isinstance(outcome, CodeOutOfMemory | CodeTimedOut),  # whichever limit it meets first
    MEGABYTE: _megabyte,
}
