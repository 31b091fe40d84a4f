"""The grader and an independent evaluator agree on numbers with one changed character."""

from collections import Counter
from fractions import Fraction

import pytest

from asterism.sandbox.pool.answer_checks import judge_answer
from tests.sandbox.grading.number_mutations import Mutation, generate_mutations
from tests.sandbox.grading.plain_evaluator import Value, evaluate

SEED = 20_261_128


def is_documented_form(mutation: Mutation) -> bool:
    """Return whether the changed text is a documented form of the truth's value."""
    given = evaluate(mutation.number, is_followed=bool(mutation.unit))
    if given is None or given.base or (mutation.unit and (given.unit or given.modulus)):
        return False
    if given.is_fraction and given.number.denominator == 1:
        return False
    if given.unit == "%":
        return given.number / 100 == mutation.value
    return given.number == mutation.value or rounds(given, mutation)


def rounds(given: Value, mutation: Mutation) -> bool:
    """Return whether a decimal rounds a fraction, with at least four decimals and four significant digits."""
    value, rest = mutation.value, mutation.value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    if mutation.unit == "\\%" or rest == 1 or given.num_decimals < 4:
        return False
    digits = str(abs(given.number) * 10**given.num_decimals)
    return len(digits) >= 4 and abs(given.number - value) <= Fraction(1, 2 * 10**given.num_decimals)


def find_disagreements(count: int, seed: int) -> tuple[list[tuple[str, str, bool]], Counter[bool]]:
    """Return (truth, answer, the grader's verdict) of each disagreement, and the number of each verdict."""
    found: list[tuple[str, str, bool]] = []
    verdicts: Counter[bool] = Counter()
    for mutation in generate_mutations(count, seed):
        answer = mutation.number + mutation.unit
        verdict = judge_answer(answer, mutation.truth, "number")
        assert verdict is not None, f"{answer!r} needs math-verify"
        verdicts[verdict] += 1
        if verdict != is_documented_form(mutation):
            found.append((mutation.truth, answer, verdict))
    return found, verdicts


@pytest.mark.slow
def test_the_grader_and_the_evaluator_agree_on_a_thousand_changed_numbers() -> None:
    disagreements, verdicts = find_disagreements(1000, SEED)
    assert disagreements == []
    assert verdicts[True] > 20
    assert verdicts[False] > 500


@pytest.mark.slow
@pytest.mark.nightly
def test_the_grader_and_the_evaluator_agree_on_twenty_thousand_changed_numbers() -> None:
    disagreements, _ = find_disagreements(20_000, SEED + 1)
    assert disagreements == []
