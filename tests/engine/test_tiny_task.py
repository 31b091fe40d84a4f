"""The tiny task: six families, answers that the right code prints, and a split that gives nothing away."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from bus.messages import CodeOk, CodeRaised
from configs.errors import UnusableInput
from engine.tiny.sft import run_snippet
from engine.tiny.task import FAMILIES, Question, is_held_out, questions


@pytest.fixture(scope="module")
def train() -> list[Question]:
    return questions(0, 300, held_out=False)


@pytest.fixture(scope="module")
def test() -> list[Question]:
    return questions(0, 120, held_out=True)


def printed(question: Question, template: str) -> str:
    outcome = run_snippet(question.code(template))
    assert isinstance(outcome, CodeOk)
    return outcome.output.stdout


def test_the_answer_is_what_every_right_snippet_prints(train: list[Question]) -> None:
    for question in train:
        for template in FAMILIES[question.family].right:
            assert printed(question, template) == f"{question.answer}\n"


def test_the_failing_snippets_raise(train: list[Question]) -> None:
    for question in train:
        family = FAMILIES[question.family]
        for template in (family.failing, family.hopeless):
            assert isinstance(run_snippet(question.code(template)), CodeRaised)


def test_some_wrong_snippet_prints_something_else(train: list[Question]) -> None:
    for question in train:
        prints = {printed(question, template) for template in FAMILIES[question.family].wrong}
        assert prints != {f"{question.answer}\n"}


def test_answers_are_short_enough_to_be_copied(train: list[Question]) -> None:
    assert all(0 <= question.answer < 1000 for question in train)


def test_no_operands_stand_on_both_sides_of_the_split_in_whatever_order(
    train: list[Question], test: list[Question]
) -> None:
    def keys(side: list[Question]) -> set[tuple[str, tuple[int, ...]]]:
        return {(question.family, tuple(sorted(question.operands))) for question in side}

    assert not keys(train) & keys(test)


def test_no_question_comes_twice(train: list[Question]) -> None:
    assert len({question.text for question in train}) == len(train)


def test_every_family_is_there_on_both_sides(train: list[Question], test: list[Question]) -> None:
    for side in (train, test):
        assert Counter(question.family for question in side).keys() == FAMILIES.keys()


def test_the_split_depends_on_the_seed() -> None:
    splits = {tuple(is_held_out(seed, "primes", (n,)) for n in range(10, 100)) for seed in range(3)}
    assert len(splits) == 3


def test_the_same_seed_gives_the_same_questions(test: list[Question]) -> None:
    assert questions(0, 120, held_out=True) == test
    assert questions(1, 120, held_out=True) != test


def test_more_questions_than_there_are_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tiny.task.FAMILIES", {"primes": FAMILIES["primes"]})
    with pytest.raises(
        UnusableInput, match=r"tiny.num_train_questions = 80: there are hardly more than \d+ different ones"
    ):
        questions(0, 80, held_out=False)


def test_a_digit_sum_and_a_count_of_primes_are_what_mathematics_says(train: list[Question]) -> None:
    for question in train:
        if question.family == "primes":
            (n,) = question.operands
            assert question.answer == sum(all(m % d for d in range(2, math.isqrt(m) + 1)) for m in range(2, n))
