"""The load generator counts what was answered: on a sandbox that answers as it is told."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import NoReturn

import pytest

from bus.messages import (
    AnswerSubmitted,
    CodeOk,
    CodeOutcome,
    CodeOutOfMemory,
    CodeRequested,
    CodeTimedOut,
    Output,
)
from sandbox.contract import CodeResult, Grade, Isolation, SandboxFailure
from sandbox.load import Tally, burst, cells, closed_loop, for_seconds, mixture, numbered_programs, percentile, programs


class ToldSandbox:
    """Implements sandbox.contract.Sandbox. `answers` are by code; what is missing is an infrastructure failure."""

    def __init__(self, answers: dict[str, CodeOutcome]) -> None:
        self._answers = answers
        self.running = 0
        self.most_running = 0

    async def start(self) -> Isolation:
        return Isolation("told", (), False, ())

    async def run(self, call: CodeRequested) -> CodeResult:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if call.code not in self._answers:
            raise SandboxFailure("nobody knows")
        return CodeResult(self._answers[call.code], 0.0)

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        raise NotImplementedError

    async def until_broken(self) -> NoReturn:
        while True:
            await asyncio.Event().wait()

    def restore_session(self, trajectory_id: int, cells: Sequence[CodeRequested]) -> None: ...

    async def end_session(self, trajectory_id: int) -> None: ...

    async def close(self) -> None: ...


def said(text: str) -> CodeOk:
    return CodeOk(Output(text))


def test_a_closed_loop_keeps_so_many_calls_in_flight_and_checks_each_answer():
    sandbox = ToldSandbox({"print(1+1)": said("2\n")})
    figures = asyncio.run(closed_loop(sandbox, programs("print", range(100)), 7)).figures()
    assert sandbox.most_running == 7
    assert (figures.submitted, figures.answered, figures.duplicates, figures.failures) == (100, 100, 0, {})
    assert len(figures.latencies_ms) == 100
    assert figures.per_s > 0


def test_a_burst_is_in_flight_all_at_once():
    sandbox = ToldSandbox({f"print({number})": said(f"{number}\n") for number in range(300)})
    figures = asyncio.run(burst(sandbox, list(numbered_programs(range(300))))).figures()
    assert sandbox.most_running == 300
    assert (figures.answered, figures.failures) == (300, {})


def test_an_answer_of_another_call_is_a_wrong_one():
    sandbox = ToldSandbox({"print(0)": said("0\n"), "print(1)": said("0\n")})
    figures = asyncio.run(burst(sandbox, list(numbered_programs(range(2))))).figures()
    assert (figures.answered, figures.failures) == (2, {"print: CodeOk": 1})


def test_failures_of_the_infrastructure_are_counted_by_cause_and_are_no_answers():
    sandbox = ToldSandbox({"print(0)": said("0\n")})
    figures = asyncio.run(burst(sandbox, list(numbered_programs(range(3))))).figures()
    assert (figures.submitted, figures.answered, figures.failures) == (3, 1, {"nobody knows": 2})
    assert len(figures.latencies_ms) == 1


def test_a_second_answer_is_a_duplicate_and_changes_nothing_else():
    tally = Tally()
    for probe in numbered_programs(range(2)):
        tally.asked(probe, now=10.0)
    tally.finished((0, 0), said("0\n"), now=11.0)
    tally.finished((0, 0), said("wrong"), now=19.0)
    tally.failed((0, 0), "late failure", now=19.5)
    assert tally.unanswered == 1
    tally.finished((1, 0), said("1\n"), now=12.0)
    tally.finished((77, 0), said("2\n"), now=13.0)
    figures = tally.figures()
    assert (figures.answered, figures.duplicates, figures.elapsed_s) == (2, 2, 2.0)
    assert figures.latencies_ms == [1000.0, 2000.0]
    assert figures.failures == {"an answer to no call": 1}
    assert tally.unanswered == 0


def test_a_call_without_an_answer_is_a_failure_and_a_call_made_twice_is_refused():
    tally = Tally()
    (probe,) = numbered_programs(range(1))
    tally.asked(probe, now=0.0)
    assert (tally.figures().answered, tally.figures().failures) == (0, {"no answer": 1})
    with pytest.raises(ValueError, match="made twice"):
        tally.asked(probe, now=1.0)


def test_cells_of_one_notebook_that_come_out_of_order_are_counted():
    tally = Tally()
    for probe in cells("cell", notebooks=range(2), calls=range(3)):
        tally.asked(probe, now=0.0)
    for call_id in ((0, 0), (1, 1), (0, 1), (1, 0), (0, 2), (1, 2)):
        tally.finished(call_id, said("2\n"), now=1.0)
    assert tally.figures().overtaken == 1


def test_a_mixture_is_counted_by_kind_and_the_healthy_calls_end_with_the_last_of_them():
    probes = mixture(healthy=950)
    tally = Tally()
    for probe in probes:
        tally.asked(probe, now=0.0)
    outcomes = {"loop": CodeTimedOut(Output(), 4.0), "hog": CodeOutOfMemory(Output(), 512)}
    for number, probe in enumerate(sorted(probes, key=lambda probe: probe.kind == "loop")):
        healthy_or_long = said("2\n") if probe.kind == "print" else said("x" * 1_000_001)
        tally.finished(probe.call_id, outcomes.get(probe.kind, healthy_or_long), now=float(number + 1))
    kinds = {kind: tally.figures(kind) for kind in ("print", "loop", "hog", "megabyte")}
    assert {kind: figures.answered for kind, figures in kinds.items()} == {
        "print": 950,
        "loop": 20,
        "hog": 20,
        "megabyte": 10,
    }
    assert tally.figures().failures == {}
    assert kinds["print"].elapsed_s <= 980
    assert tally.figures().elapsed_s == 1000
    assert [probe.call.trajectory_id for probe in probes] != list(range(1000))


def test_a_closed_loop_can_end_by_time(monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count(100.0)  # a second passes between two looks at it
    monkeypatch.setattr("sandbox.load.time.perf_counter", lambda: next(clock))
    assert len(list(for_seconds(programs("print", itertools.count()), seconds=5.0))) == 6


def test_percentiles_are_values_that_were_measured():
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, percent) for percent in (50, 99, 100)] == [50.0, 99.0, 100.0]
    assert percentile([3.0], 99) == 3.0
    assert percentile([], 50) == 0.0
