"""The tiny task: six families, correct answers, and a split without overlap."""

import math
from collections import Counter

import pytest

from asterism.bus.messages import CodeOk, CodeRaised
from asterism.configs.errors import UnusableInput
from asterism.tasks.tiny.cold_start_dialogues import run_snippet
from asterism.tasks.tiny.questions import FAMILIES, Question, generate_questions, is_held_out


@pytest.fixture(scope="module")
def train() -> list[Question]:
    return generate_questions(0, 300, held_out=False)


@pytest.fixture(scope="module")
def test() -> list[Question]:
    return generate_questions(0, 120, held_out=True)


def run_and_get_stdout(question: Question, template: str) -> str:
    outcome = run_snippet(question.fill_snippet(template))
    assert isinstance(outcome, CodeOk)
    return outcome.output.stdout


def test_every_correct_snippet_prints_the_answer(train: list[Question]) -> None:
    for question in train:
        for template in FAMILIES[question.family].correct_snippets:
            assert run_and_get_stdout(question, template) == f"{question.answer}\n"


def test_the_failing_snippets_raise(train: list[Question]) -> None:
    for question in train:
        family = FAMILIES[question.family]
        for template in (family.failing_snippet, family.unfixable_snippet):
            assert isinstance(run_snippet(question.fill_snippet(template)), CodeRaised)


def test_at_least_one_wrong_snippet_prints_a_wrong_answer(train: list[Question]) -> None:
    for question in train:
        prints = {run_and_get_stdout(question, template) for template in FAMILIES[question.family].wrong_snippets}
        assert prints != {f"{question.answer}\n"}


def test_answers_have_at_most_three_digits(train: list[Question]) -> None:
    assert all(0 <= question.answer < 1000 for question in train)


def test_questions_with_equal_operands_are_on_one_side(train: list[Question], test: list[Question]) -> None:
    def keys(side: list[Question]) -> set[tuple[str, tuple[int, ...]]]:
        return {(question.family, tuple(sorted(question.operands))) for question in side}

    assert not keys(train) & keys(test)


def test_questions_are_distinct(train: list[Question]) -> None:
    assert len({question.text for question in train}) == len(train)


def test_both_sides_contain_every_family(train: list[Question], test: list[Question]) -> None:
    for side in (train, test):
        assert Counter(question.family for question in side).keys() == FAMILIES.keys()


def test_the_split_depends_on_the_seed() -> None:
    splits = {tuple(is_held_out(seed, "primes", (n,)) for n in range(10, 100)) for seed in range(3)}
    assert len(splits) == 3


def test_too_many_requested_questions_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asterism.tasks.tiny.questions.FAMILIES", {"primes": FAMILIES["primes"]})
    with pytest.raises(
        UnusableInput, match=r"prepare.parameters.num_train_questions = 80: only about \d+ distinct questions exist"
    ):
        generate_questions(0, 80, held_out=False)


def test_prime_counts_are_correct(train: list[Question]) -> None:
    for question in train:
        if question.family == "primes":
            (n,) = question.operands
            assert question.answer == sum(all(m % d for d in range(2, math.isqrt(m) + 1)) for m in range(2, n))
