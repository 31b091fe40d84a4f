"""The experiment on classified errors: labels that hold, rules that count as documented."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asterism.bus.messages import CodeCrashed, CodeOk, CodeRaised, CodeTimedOut, Output
from asterism.policies.dialogue.parse_turn import MalformedCall
from benchmarks.experiments.error_classification import (
    RELEASE,
    RELEASE_DEFAULTS,
    STATUS,
    Verdict,
    compute_figures,
    compute_shares,
    judge_call,
    run_in_sandbox,
)
from benchmarks.experiments.labelled_programs import STDIN, LabelledCall, LabelledProgram, list_calls, list_programs

PROGRAMS = list_programs()
LIMITED = "a limit"
WALL_LIMIT_S = 4.0  # limit of a program that reaches a limit of the sandbox
SHELL = 'ulimit -v 3000000 -t 2 -c 0; exec "$0" "$@"'


def test_at_least_40_programs_look_wrong_and_20_look_right() -> None:
    right = [program for program in PROGRAMS if program.is_right]
    ran = [program for program in PROGRAMS if not program.call]
    wrong = [program for program in ran if not program.is_right and not program.hides_failure]
    assert len(right) >= 40
    assert len(wrong) >= 20
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
    assert all(program.wanted for program in PROGRAMS if program.is_right or program.hides_failure)


def run_interpreter(code: str, folder: Path, limit_s: float) -> subprocess.CompletedProcess[str] | None:
    """Run an ordinary interpreter with limits on memory and processor time; None beyond `limit_s`."""
    source = folder / "program.py"
    source.write_text(code)
    environment = {"PATH": os.environ["PATH"], "OPENBLAS_NUM_THREADS": "1"}
    command = ["bash", "-c", SHELL, sys.executable, str(source)]
    try:
        return subprocess.run(
            command, input=STDIN, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return None


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("program", [each for each in PROGRAMS if not each.call], ids=lambda program: program.name)
def test_an_ordinary_interpreter_agrees_with_the_label_of_each_program(
    program: LabelledProgram, tmp_path: Path
) -> None:
    done = run_interpreter(program.code, tmp_path, WALL_LIMIT_S if program.kind == LIMITED else 60.0)
    succeeds = done is not None and done.returncode == 0
    assert succeeds == (program.is_right or program.hides_failure), done
    if done is not None and program.wanted and program.name != "output_cut":
        assert (program.wanted in done.stdout) == program.is_right


@pytest.mark.slow
def test_the_sandbox_agrees_with_the_label_of_each_program() -> None:
    verdicts = asyncio.run(run_in_sandbox(list(list_calls(PROGRAMS)), "process", seed=0))
    assert len(verdicts) >= 100
    for call, outcome, _ in verdicts:
        succeeds = isinstance(outcome, CodeOk) or (isinstance(outcome, CodeCrashed) and outcome.exit_code == 0)
        assert succeeds == (call.program.is_right or call.program.hides_failure), (call, outcome)
        if succeeds:
            assert isinstance(outcome, CodeOk | CodeCrashed)
            assert (call.program.wanted in outcome.output.stdout) == call.program.is_right, (call, outcome)
    assert compute_figures([verdicts])["status_false_positives"] <= 1


def make_call(*, is_right: bool) -> LabelledCall:
    return LabelledCall(LabelledProgram("one", "a kind", "1", is_right), "jupyter_code", "")


RAISED = CodeRaised(Output(), "ValueError: x", "Traceback (most recent call last):\nValueError: x\n")


@pytest.mark.parametrize(
    ("outcome", "counted"),
    [
        (CodeOk(Output("relative Error: 0")), (False, True, True)),
        (CodeOk(Output("42")), (False, False, False)),
        (RAISED, (True, True, True)),
        (CodeTimedOut(Output("42"), 4.0), (True, False, False)),
        (CodeCrashed(Output("42"), 1), (True, False, False)),
        (MalformedCall("JSONDecodeError: Expecting value", is_decoded=False), (True, False, False)),
        (MalformedCall("unknown function"), (True, True, False)),
    ],
)
def test_each_rule_counts_calls_by_its_definition(
    outcome: CodeOk | CodeRaised | MalformedCall, counted: tuple[bool, ...]
) -> None:
    assert judge_call(make_call(is_right=True), outcome).counts_as_failed == counted


def test_figures_count_mistakes_in_both_directions_and_differences_between_seeds() -> None:
    def make_verdicts(first: tuple[bool, bool, bool]) -> list[Verdict]:
        calls = make_call(is_right=True), make_call(is_right=False)
        return [Verdict(calls[0], RAISED, first), Verdict(calls[1], RAISED, (True, False, False))]

    by_seed = [make_verdicts((False, True, True)), make_verdicts((False, True, False))]
    figures = compute_figures(by_seed)
    assert (figures["calls"], figures["right_calls"], figures["seeds"], figures["differing_calls"]) == (2, 1, 2, 1)
    assert [figures[f"{rule}_false_positives"] for rule in (STATUS, RELEASE, RELEASE_DEFAULTS)] == [0, 1, 0.5]
    assert [figures[f"{rule}_false_negatives"] for rule in (STATUS, RELEASE, RELEASE_DEFAULTS)] == [0, 1, 1]
    shares = compute_shares(by_seed[0], is_right=False)
    assert shares == {"a kind": {STATUS: 0.0, RELEASE: 1.0, RELEASE_DEFAULTS: 1.0}}
