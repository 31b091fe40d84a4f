"""Tests of the load test's counts and latencies, with a sandbox of scripted answers."""

import asyncio
import itertools

import pytest

from asterism.bus.messages import CodeOk, CodeOutcome, CodeOutOfMemory, CodeRequested, CodeTimedOut, Output
from asterism.sandbox.contract import CodeResult, SandboxFailure
from asterism.sandbox.load_test import (
    CallTally,
    limit_duration,
    make_program_probes,
    percentile,
    run_burst,
    run_closed_loop,
)
from benchmarks.support.sandbox.probes import make_cell_probes, make_mixed_probes, make_numbered_probes


class ScriptedSandbox:
    """A sandbox that answers codes from `answers`, and any other code with an infrastructure failure."""

    def __init__(self, answers: dict[str, CodeOutcome]) -> None:
        self._answers = answers
        self.running = 0
        self.max_running = 0

    async def run(self, call: CodeRequested) -> CodeResult:
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if call.code not in self._answers:
            raise SandboxFailure("no answer in the script")
        return CodeResult(self._answers[call.code], 0.0)


def make_ok(text: str) -> CodeOk:
    return CodeOk(Output(text))


def test_a_closed_loop_has_a_fixed_number_of_calls_in_flight_and_checks_each_answer():
    sandbox = ScriptedSandbox({"print(1+1)": make_ok("2\n")})
    figures = asyncio.run(run_closed_loop(sandbox, make_program_probes("print", range(100)), 7)).compute_figures()
    assert sandbox.max_running == 7
    assert (figures.submitted, figures.answered, figures.duplicates, figures.failures) == (100, 100, 0, {})
    assert len(figures.latencies_ms) == 100
    assert figures.per_s > 0


def test_a_burst_puts_all_calls_in_flight():
    sandbox = ScriptedSandbox({f"print({number})": make_ok(f"{number}\n") for number in range(300)})
    figures = asyncio.run(run_burst(sandbox, list(make_numbered_probes(range(300))))).compute_figures()
    assert sandbox.max_running == 300
    assert (figures.answered, figures.failures) == (300, {})


def test_the_answer_to_another_call_counts_as_wrong():
    sandbox = ScriptedSandbox({"print(0)": make_ok("0\n"), "print(1)": make_ok("0\n")})
    figures = asyncio.run(run_burst(sandbox, list(make_numbered_probes(range(2))))).compute_figures()
    assert (figures.answered, figures.failures) == (2, {"print: CodeOk": 1})


def test_infrastructure_failures_are_counted_by_cause_and_not_as_answers():
    sandbox = ScriptedSandbox({"print(0)": make_ok("0\n")})
    figures = asyncio.run(run_burst(sandbox, list(make_numbered_probes(range(3))))).compute_figures()
    assert (figures.submitted, figures.answered, figures.failures) == (3, 1, {"no answer in the script": 2})
    assert len(figures.latencies_ms) == 1


def test_a_duplicate_answer_changes_only_the_count_of_duplicates():
    tally = CallTally()
    for probe in make_numbered_probes(range(2)):
        tally.record_request(probe, now=10.0)
    tally.record_outcome((0, 0), make_ok("0\n"), now=11.0)
    tally.record_outcome((0, 0), make_ok("wrong"), now=19.0)
    tally.record_failure((0, 0), "late failure", now=19.5)
    assert tally.unanswered == 1
    tally.record_outcome((1, 0), make_ok("1\n"), now=12.0)
    tally.record_outcome((77, 0), make_ok("2\n"), now=13.0)
    figures = tally.compute_figures()
    assert (figures.answered, figures.duplicates, figures.elapsed_s) == (2, 2, 2.0)
    assert figures.latencies_ms == [1000.0, 2000.0]
    assert figures.failures == {"an answer to no call": 1}
    assert tally.unanswered == 0


def test_a_call_without_an_answer_is_a_failure_and_a_repeated_call_is_refused():
    tally = CallTally()
    (probe,) = make_numbered_probes(range(1))
    tally.record_request(probe, now=0.0)
    assert (tally.compute_figures().answered, tally.compute_figures().failures) == (0, {"no answer": 1})
    with pytest.raises(ValueError, match="made twice"):
        tally.record_request(probe, now=1.0)


def test_out_of_order_answers_to_cells_of_one_notebook_are_counted():
    tally = CallTally()
    for probe in make_cell_probes("cell", notebooks=range(2), calls=range(3)):
        tally.record_request(probe, now=0.0)
    for call_id in ((0, 0), (1, 1), (0, 1), (1, 0), (0, 2), (1, 2)):
        tally.record_outcome(call_id, make_ok("2\n"), now=1.0)
    assert tally.compute_figures().out_of_order == 1


@pytest.mark.slow
def test_every_kind_of_call_of_a_mixed_load_has_separate_figures():
    probes = make_mixed_probes(healthy=950)
    tally = CallTally()
    for probe in probes:
        tally.record_request(probe, now=0.0)
    outcomes = {"loop": CodeTimedOut(Output(), 4.0), "hog": CodeOutOfMemory(Output(), 512)}
    for number, probe in enumerate(sorted(probes, key=lambda probe: probe.kind == "loop")):
        healthy_or_long = make_ok("2\n") if probe.kind == "print" else make_ok("x" * 1_000_001)
        tally.record_outcome(probe.call_id, outcomes.get(probe.kind, healthy_or_long), now=float(number + 1))
    kinds = {kind: tally.compute_figures(kind) for kind in ("print", "loop", "hog", "megabyte")}
    assert {kind: figures.answered for kind, figures in kinds.items()} == {
        "print": 950,
        "loop": 20,
        "hog": 20,
        "megabyte": 10,
    }
    assert tally.compute_figures().failures == {}
    assert kinds["print"].elapsed_s <= 980
    assert tally.compute_figures().elapsed_s == 1000
    assert [probe.call.trajectory_id for probe in probes] != list(range(1000))


def test_probes_end_after_the_duration_limit(monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count(100.0)  # every read advances the clock by a second
    monkeypatch.setattr("asterism.sandbox.load_test.time.perf_counter", lambda: next(clock))
    assert len(list(limit_duration(make_program_probes("print", itertools.count()), seconds=5.0))) == 6


def test_percentiles_are_measured_values():
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, percent) for percent in (50, 99, 100)] == [50.0, 99.0, 100.0]
    assert percentile([3.0], 99) == 3.0
    assert percentile([], 50) == 0.0
