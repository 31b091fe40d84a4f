"""Puts load on a sandbox; measures latencies, throughput, and wrong, lost and duplicate answers.

run_closed_loop(sandbox, probes, in_flight)   `in_flight` callers; each waits for an answer before its next call
run_burst(sandbox, probes)                    all calls concurrently
measure_programs(sandbox, kind, in_flight, s) a closed loop of programs of one kind for some seconds
CallTally                                     counts calls and answers; answers can arrive as messages
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Protocol

import msgspec

from asterism.bus.messages import CodeOk, CodeOutcome, CodeRequested
from asterism.sandbox.contract import CodeResult, SandboxFailure

CallId = tuple[int, int]  # trajectory, call
PRINT, NUMPY, SYMPY = "print", "numpy", "sympy"
CODE = {
    PRINT: "print(1+1)",
    NUMPY: "import numpy as np; print(np.arange(1000).sum())",
    SYMPY: 'import sympy; x = sympy.Symbol("x"); print(sympy.solve(x**2 - 5*x + 6, x))',
}
PRINTED = {PRINT: "2\n", NUMPY: "499500\n", SYMPY: "[2, 3]\n"}


class CallRunner(Protocol):
    """The target of the load: a sandbox, or a client of a sandbox behind the bus."""

    async def run(self, call: CodeRequested) -> CodeResult: ...


class Probe(msgspec.Struct, frozen=True):
    """A call with a check of its outcome."""

    kind: str
    call: CodeRequested
    accepts: Callable[[CodeOutcome], bool]

    @property
    def call_id(self) -> CallId:
        return self.call.trajectory_id, self.call.call


class LoadFigures(msgspec.Struct, frozen=True):
    submitted: int
    answered: int  # calls with an outcome, right or wrong
    duplicates: int  # answers after a call's first one
    out_of_order: int  # answers that arrived after the answer to a later cell of the same notebook
    failures: dict[str, int]  # infrastructure failures, wrong and missing outcomes, by cause
    elapsed_s: float  # time from the first call to the last call's first answer
    latencies_ms: Sequence[float]  # latencies of the calls with an outcome, ascending

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
    """Return the smallest value that `percent` percent of the values do not exceed, or 0 without values."""
    return ascending[max(0, -(-len(ascending) * percent // 100) - 1)] if ascending else 0.0


class _CallRecord(msgspec.Struct):
    """The record of one call. `cause` is the reason for a failure; None if the first answer is right."""

    probe: Probe
    asked_at: float
    answered_at: float | None = None
    has_outcome: bool = False
    cause: str | None = "no answer"
    duplicates: int = 0
    is_out_of_order: bool = False


class CallTally:
    """A tally of calls, by trajectory and number, and of their answers. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._records: dict[CallId, _CallRecord] = {}
        self._last_cell: dict[int, int] = {}  # highest answered call number, by trajectory
        self._unknown_answers = 0
        self.unanswered = 0  # calls without an answer yet

    def record_request(self, probe: Probe, now: float) -> None:
        """Record the request of a call. Raises ValueError for a second call of the same trajectory and number."""
        if probe.call_id in self._records:
            raise ValueError(f"call {probe.call_id} was made twice")
        self._records[probe.call_id] = _CallRecord(probe, now)
        self.unanswered += 1

    def record_outcome(self, call_id: CallId, outcome: CodeOutcome, now: float) -> None:
        record = self._record_answer(call_id, now)
        if record is None:
            return
        record.has_outcome = True
        record.cause = None if record.probe.accepts(outcome) else f"{record.probe.kind}: {type(outcome).__name__}"
        if record.probe.call.tool == "jupyter_code":
            trajectory, call = call_id
            last = self._last_cell.get(trajectory, -1)
            record.is_out_of_order = call < last
            self._last_cell[trajectory] = max(last, call)

    def record_failure(self, call_id: CallId, cause: str, now: float) -> None:
        """Record an infrastructure failure as the answer to a call."""
        record = self._record_answer(call_id, now)
        if record is not None:
            record.cause = cause

    def compute_figures(self, kind: str | None = None) -> LoadFigures:
        """Return the figures of all calls, or of the calls of one kind."""
        records = [record for record in self._records.values() if kind in (None, record.probe.kind)]
        ended = [record.answered_at for record in records if record.answered_at is not None]
        causes = Counter(record.cause for record in records if record.cause is not None)
        if kind is None and self._unknown_answers:
            causes["an answer to no call"] = self._unknown_answers
        return LoadFigures(
            submitted=len(records),
            answered=sum(record.has_outcome for record in records),
            duplicates=sum(record.duplicates for record in records),
            out_of_order=sum(record.is_out_of_order for record in records),
            failures=dict(causes),
            elapsed_s=max(ended) - min(record.asked_at for record in records) if ended else 0.0,
            latencies_ms=sorted(
                1000 * (record.answered_at - record.asked_at)
                for record in records
                if record.has_outcome and record.answered_at is not None
            ),
        )

    def _record_answer(self, call_id: CallId, now: float) -> _CallRecord | None:
        record = self._records.get(call_id)
        if record is None:
            self._unknown_answers += 1
            return None
        if record.answered_at is not None:
            record.duplicates += 1
            return None
        record.answered_at = now
        self.unanswered -= 1
        return record


# ---------------------------------------------------------------- loads


async def run_closed_loop(sandbox: CallRunner, probes: Iterable[Probe], in_flight: int) -> CallTally:
    tally = CallTally()
    remaining = iter(probes)

    async def run_caller() -> None:
        for probe in remaining:
            await _submit(sandbox, probe, tally)

    await asyncio.gather(*[run_caller() for _ in range(in_flight)])
    return tally


async def run_burst(sandbox: CallRunner, probes: Sequence[Probe]) -> CallTally:
    return await run_closed_loop(sandbox, probes, len(probes))


def limit_duration(probes: Iterable[Probe], seconds: float) -> Iterator[Probe]:
    """Yield probes until `seconds` after the first one."""
    end: float | None = None
    for probe in probes:
        now = time.perf_counter()
        end = end or now + seconds
        if now > end:
            return
        yield probe


async def measure_programs(sandbox: CallRunner, kind: str, in_flight: int, seconds: float) -> LoadFigures:
    """Return the figures of programs of one kind that are requested within `seconds`."""
    probes = limit_duration(make_program_probes(kind, count()), seconds)
    return (await run_closed_loop(sandbox, probes, in_flight)).compute_figures()


async def _submit(sandbox: CallRunner, probe: Probe, tally: CallTally) -> None:
    tally.record_request(probe, time.perf_counter())
    try:
        result = await sandbox.run(probe.call)
    except SandboxFailure as error:
        tally.record_failure(probe.call_id, str(error), time.perf_counter())
    else:
        tally.record_outcome(probe.call_id, result.outcome, time.perf_counter())


# ---------------------------------------------------------------- probes


def make_program_probes(kind: str, trajectories: Iterable[int]) -> Iterator[Probe]:
    """Yield stateless calls, one for each trajectory."""
    for trajectory in trajectories:
        yield make_program_probe(kind, trajectory, CODE[kind], expect_stdout(PRINTED[kind]))


def make_program_probe(kind: str, trajectory: int, code: str, accepts: Callable[[CodeOutcome], bool]) -> Probe:
    return Probe(kind, CodeRequested(trajectory, 0, "python_code_with_standard_io", code, ""), accepts)


def expect_stdout(text: str) -> Callable[[CodeOutcome], bool]:
    return lambda outcome: isinstance(outcome, CodeOk) and outcome.output.stdout == text
