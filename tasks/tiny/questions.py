"""Draws questions from six families: arithmetic, gcd, lcm, remainder, digit sum, primes.

The numbers are short, because a tiny model learns to write code before it learns to copy long numbers.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import NamedTuple

from asterism.configs.errors import UnusableInput
from asterism.policies.seeded_random import draw_uniform

TEST_SHARE = 0.2  # share of each family's operands in the test set


class QuestionFamily(NamedTuple):
    """A family of questions. The templates contain `{a}`, `{b}`, `{c}` for operands and `{e}` for the expression."""

    question: str
    draw_operands: Callable[[Random], tuple[int, ...]]
    compute_answer: Callable[..., int]
    correct_snippets: tuple[str, ...]  # code that prints the answer
    failing_snippet: str  # code that raises an error, before a repaired call
    unfixable_snippet: str  # code that raises an error, before a guess
    wrong_snippets: tuple[str, ...]  # code that prints a wrong answer


class Question(NamedTuple):
    family: str
    operands: tuple[int, ...]
    text: str
    answer: int

    def fill_snippet(self, template: str) -> str:
        return _fill_template(template, self.operands)


# Expressions of arithmetic questions. Three operands of a question are numbers; the fourth selects the expression.
_EXPRESSIONS = ("{a}+{b}+{c}", "{a}+{b}-{c}", "{a}*{b}+{c}", "{a}*{b}-{c}")


def _evaluate_expression(a: int, b: int, c: int, expression: int) -> int:
    left = a + b if expression < 2 else a * b
    return left - c if expression % 2 else left + c


def _draw_gcd(random: Random) -> tuple[int, ...]:
    factor = random.randrange(2, 13)  # a common factor: independent numbers rarely have a large one
    return factor * random.randrange(2, 99 // factor + 1), factor * random.randrange(2, 99 // factor + 1)


def _draw_from(*ranges: range) -> Callable[[Random], tuple[int, ...]]:
    return lambda random: tuple(random.choice(numbers) for numbers in ranges)


def _digit_sum(a: int, b: int) -> int:
    return sum(int(digit) for digit in str(a**b))


@functools.cache
def _count_primes_below(n: int) -> int:
    return sum(map(is_prime, range(2, n)))


def is_prime(number: int) -> bool:
    """Return whether `number`, which is at least 2, is prime."""
    return all(number % divisor for divisor in range(2, number))


FAMILIES: dict[str, QuestionFamily] = {
    "arithmetic": QuestionFamily(
        question="What is {e}?",
        draw_operands=_draw_from(range(10, 100), range(2, 10), range(2, 10), range(len(_EXPRESSIONS))),
        compute_answer=_evaluate_expression,
        correct_snippets=("print({e})", "{e}"),
        failing_snippet="calc({e})",
        unfixable_snippet="solve({e})",
        wrong_snippets=("print({a}+{b})", "print({a}-{b})", "print({a}*{b})"),
    ),
    "gcd": QuestionFamily(
        question="What is the greatest common divisor of {a} and {b}?",
        draw_operands=_draw_gcd,
        compute_answer=math.gcd,
        correct_snippets=("import math; print(math.gcd({a},{b}))", "import math; math.gcd({a},{b})"),
        failing_snippet="gcd({a},{b})",
        unfixable_snippet="solve({a},{b})",
        wrong_snippets=("print({a}//{b})", "print({a}-{b})", "print(min({a},{b}))"),
    ),
    "lcm": QuestionFamily(
        question="What is the least common multiple of {a} and {b}?",
        draw_operands=_draw_from(range(4, 32), range(4, 32)),
        compute_answer=math.lcm,
        correct_snippets=("import math; print(math.lcm({a},{b}))", "import math; math.lcm({a},{b})"),
        failing_snippet="lcm({a},{b})",
        unfixable_snippet="solve({a},{b})",
        wrong_snippets=("print({a}+{b})", "print({a}*{b})", "print(max({a},{b}))"),
    ),
    "remainder": QuestionFamily(
        question="What is {a} mod {b}?",
        draw_operands=_draw_from(range(100, 1000), range(3, 30)),
        compute_answer=operator.mod,
        correct_snippets=("print({a}%{b})", "{a}%{b}"),
        failing_snippet="mod({a},{b})",
        unfixable_snippet="solve({a},{b})",
        wrong_snippets=("print({a}//{b})", "print({a}-{b})", "print({a}+{b})"),
    ),
    "digit_sum": QuestionFamily(
        question="What is the digit sum of {a}**{b}?",
        draw_operands=_draw_from(range(2, 100), range(2, 20)),
        compute_answer=_digit_sum,
        correct_snippets=("print(sum(map(int,str({a}**{b}))))", "sum(map(int,str({a}**{b})))"),
        failing_snippet="sum({a}**{b})",
        unfixable_snippet="solve({a}**{b})",
        wrong_snippets=("print(sum(map(int,str({a}*{b}))))", "print(len(str({a}**{b})))", "print({a}*{b})"),
    ),
    "primes": QuestionFamily(
        question="How many primes are below {a}?",
        draw_operands=_draw_from(range(10, 100)),
        compute_answer=_count_primes_below,
        correct_snippets=(
            "print(sum(all(n%d for d in range(2,n)) for n in range(2,{a})))",
            "sum(all(n%d for d in range(2,n)) for n in range(2,{a}))",
        ),
        failing_snippet="primes({a})",
        unfixable_snippet="solve({a})",
        wrong_snippets=("print({a}//2)", "print({a}//3)", "print(len(range(2,{a})))"),
    ),
}


def _fill_template(template: str, operands: tuple[int, ...]) -> str:
    return template.format(**_name_operands(operands), e=fill_expression(operands) if len(operands) > 3 else "")


def fill_expression(operands: tuple[int, ...]) -> str:
    return _EXPRESSIONS[operands[3]].format(**_name_operands(operands))


def _name_operands(operands: tuple[int, ...]) -> dict[str, int]:
    return dict(zip("abc", operands, strict=False))


def is_held_out(seed: int, family: str, operands: tuple[int, ...]) -> bool:
    """Return whether the operands belong to the test set. Their order is irrelevant: gcd(12, 18) equals gcd(18, 12)."""
    number = list(FAMILIES).index(family)
    return draw_uniform(seed, number, *sorted(operands)) < TEST_SHARE


def draw_question(random: Random, seed: int, *, held_out: bool, family: str) -> Question:
    """Draw a question of the test set if `held_out`, else of the training set."""
    kind = FAMILIES[family]
    while True:
        operands = kind.draw_operands(random)
        if is_held_out(seed, family, operands) == held_out:
            return Question(family, operands, _fill_template(kind.question, operands), kind.compute_answer(*operands))


def draw_questions(seed: int, *, held_out: bool) -> Iterator[Question]:
    """Draw an endless stream of questions that cycles through the families."""
    random = Random(2 * seed + held_out)
    while True:
        for family in FAMILIES:
            yield draw_question(random, seed, held_out=held_out, family=family)


def generate_questions(seed: int, count: int, *, held_out: bool) -> list[Question]:
    """Generate `count` distinct questions, in turn from each family. Raises UnusableInput if fewer exist."""
    chosen: dict[str, Question] = {}
    for question in islice(draw_questions(seed, held_out=held_out), 20 * count):
        chosen.setdefault(question.text, question)
        if len(chosen) == count:
            return list(chosen.values())
    key = f"prepare.parameters.num_{'test' if held_out else 'train'}_questions"
    raise UnusableInput(f"{key} = {count}: only about {len(chosen)} distinct questions exist")
