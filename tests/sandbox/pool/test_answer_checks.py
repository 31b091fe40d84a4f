"""Tests of the verdicts on generated and listed answers, with and without math-verify."""

import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from asterism.sandbox.grading.rewriting import rewrite
from asterism.sandbox.inside.grader import compare_parsed, parse_math
from asterism.sandbox.pool.answer_checks import Acceptance, judge_answer, list_compared_texts
from benchmarks.support.sandbox.answer_bombs import generate_bombs
from tests.sandbox.conftest import StartSandbox
from tests.sandbox.pool.grading_cases import GRADING_CASES, GRADING_FORMS
from tests.sandbox.pool.reported_answers import FORGED_ANSWERS, REPORTED_ANSWERS

SEED = 20_261_123


def grade(answer: str, truth: str) -> bool:
    """Return the verdict of asterism.sandbox.pool.grader_client, but compute it in this process."""
    verdict = judge_answer(answer, truth, "number")
    if verdict is None:
        expected = parse_math(rewrite(truth).text)
        texts = list_compared_texts(answer, truth)
        verdict = all(compare_parsed(parse_math(rewrite(text).text), expected) for text in texts)
    return verdict


def test_the_listed_answers_cover_the_documented_forms() -> None:
    assert len(GRADING_FORMS) >= 100
    assert len({each.form for each in GRADING_FORMS}) == len(GRADING_FORMS)
    assert all(each.reason and 1 <= len(each.correct) + len(each.wrong) <= 10 for each in GRADING_FORMS)
    assert len(GRADING_CASES) >= 700
    assert sum(not case.is_correct for case in GRADING_CASES) >= 300


@pytest.mark.slow
def test_listed_answers_have_no_false_positives_and_under_two_percent_false_negatives() -> None:
    wrong = [case for case in GRADING_CASES if grade(case.answer, case.truth) != case.is_correct]
    refused = Counter(case.form for case in wrong if case.is_correct)
    num_correct = sum(case.is_correct for case in GRADING_CASES)
    sys.stdout.write(f"{num_correct} correct answers in {len(GRADING_FORMS)} forms; refused: {dict(refused)}\n")
    assert [case for case in wrong if not case.is_correct] == []
    assert refused.total() < 0.02 * num_correct, wrong


@pytest.mark.slow
@pytest.mark.parametrize(("name", "truth", "answer", "is_correct"), REPORTED_ANSWERS)
def test_answers_of_bug_reports_have_the_right_verdict(name: str, truth: str, answer: str, is_correct: bool) -> None:
    assert grade(answer, truth) is is_correct, name


@pytest.mark.parametrize(("answer", "truth"), FORGED_ANSWERS)
def test_forged_answers_are_wrong_without_math_verify(answer: str, truth: str) -> None:
    assert judge_answer(answer, truth, "number") is False


@pytest.mark.parametrize(
    ("answer", "accept", "verdict"),
    [
        *(("75*9+8", "number", False), ("75*9+8", "expression", True), ("75*9+8", "any", None)),
        *(("75*9+9", "expression", False), ("\\sqrt{466489}", "expression", None), ("683=x", "expression", False)),
        ("\\gcd(1366,683)", "expression", False),
        ("\\gcd(1366,683)", "any", None),
        *(("\\frac{1366}{2}", "number", False), ("\\frac{1366}{2}", "any", True), ("683", "number", True)),
        ("684", "any", False),
    ],
)
def test_the_configuration_decides_whether_a_restated_question_is_an_answer(
    answer: str, accept: Acceptance, verdict: bool | None
) -> None:
    assert judge_answer(answer, "683", accept) is verdict


def test_no_rule_is_applied_to_an_answer_of_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = "4" * 5_000_000
    assert judge_answer(huge, f" {huge}\n", "number") is True
    monkeypatch.setattr("asterism.sandbox.pool.answer_checks.read_truth", None)
    assert judge_answer(huge, "4", "any") is False


@pytest.mark.slow
@pytest.mark.parametrize("truth", ["42", "x+1", "\\frac{1}{3}"])
def test_most_explosive_answers_are_judged_wrong_without_an_evaluation(truth: str) -> None:
    verdicts = [judge_answer(bomb, truth, "any") for bomb in generate_bombs(1000, SEED)]
    assert True not in verdicts
    assert verdicts.count(False) > 600


async def grade_bombs(start_sandbox: StartSandbox, bombs: Sequence[str], test_limit_s: float) -> None:
    """Check that each answer is graded as wrong, even beyond a limit, and that none raises SandboxFailure."""
    async with start_sandbox(test_limit_s, grade_limit_s=1.0) as client:
        for bomb in bombs:
            grade = await client.grade(bomb, "123456789x+1")
            assert not grade.correct, bomb
        assert (await client.grade("1+x", "x+1")).correct


@pytest.mark.slow
@pytest.mark.real_clock
@pytest.mark.parametrize("start_sandbox", ["process"], indirect=True)
async def test_no_explosive_answer_causes_an_infrastructure_failure(start_sandbox: StartSandbox) -> None:
    await grade_bombs(start_sandbox, generate_bombs(24, SEED), 120)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.real_clock
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("start_sandbox", ["process"], indirect=True)
async def test_a_thousand_explosive_answers_cause_no_infrastructure_failure(start_sandbox: StartSandbox) -> None:
    await grade_bombs(start_sandbox, generate_bombs(1000, SEED), 1800)
