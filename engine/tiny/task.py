"""Six families of questions whose answer needs the tool: arithmetic, gcd, lcm, remainder, digit sum, primes.

Numbers are short, because a tiny model learns to code before it learns to copy long numbers without a slip.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import NamedTuple

from configs.errors import UnusableInput
from policies.draws import uniform

TEST_SHARE = 0.2  # of each family's operands


class Family(NamedTuple):
    """One kind of question. In the texts `{a}`, `{b}`, `{c}` and `{e}` stand for the operands and the expression."""

    question: str
    draw: Callable[[Random], tuple[int, ...]]
    answer: Callable[..., int]
    right: tuple[str, ...]  # code that prints the answer
    failing: str  # code that raises, and is easily put right
    hopeless: str  # code that raises as well
    wrong: tuple[str, ...]  # code that prints something else


class Question(NamedTuple):
    family: str
    operands: tuple[int, ...]
    text: str
    answer: int

    def code(self, template: str) -> str:
        """One of the family's snippets, for these operands."""
        return _fill(template, self.operands)


# Arithmetic has three numbers, and a fourth operand that chooses the expression.
_EXPRESSIONS = ("{a}+{b}+{c}", "{a}+{b}-{c}", "{a}*{b}+{c}", "{a}*{b}-{c}")


def _arithmetic(a: int, b: int, c: int, expression: int) -> int:
    left = a + b if expression < 2 else a * b
    return left - c if expression % 2 else left + c


def _draw_gcd(random: Random) -> tuple[int, ...]:
    factor = random.randrange(2, 13)  # two numbers drawn on their own rarely have a common factor worth asking for
    return factor * random.randrange(2, 99 // factor + 1), factor * random.randrange(2, 99 // factor + 1)


def _draw_from(*ranges: range) -> Callable[[Random], tuple[int, ...]]:
    return lambda random: tuple(random.choice(numbers) for numbers in ranges)


def _digit_sum(a: int, b: int) -> int:
    return sum(int(digit) for digit in str(a**b))


@functools.cache
def _primes_below(n: int) -> int:
    return sum(all(number % divisor for divisor in range(2, number)) for number in range(2, n))


FAMILIES: dict[str, Family] = {
    "arithmetic": Family(
        question="What is {e}?",
        draw=_draw_from(range(10, 100), range(2, 10), range(2, 10), range(len(_EXPRESSIONS))),
        answer=_arithmetic,
        right=("print({e})", "{e}"),
        failing="calc({e})",
        hopeless="solve({e})",
        wrong=("print({a}+{b})", "print({a}-{b})", "print({a}*{b})"),
    ),
    "gcd": Family(
        question="What is the greatest common divisor of {a} and {b}?",
        draw=_draw_gcd,
        answer=math.gcd,
        right=("import math; print(math.gcd({a},{b}))", "import math; math.gcd({a},{b})"),
        failing="gcd({a},{b})",
        hopeless="solve({a},{b})",
        wrong=("print({a}//{b})", "print({a}-{b})", "print(min({a},{b}))"),
    ),
    "lcm": Family(
        question="What is the least common multiple of {a} and {b}?",
        draw=_draw_from(range(4, 32), range(4, 32)),
        answer=math.lcm,
        right=("import math; print(math.lcm({a},{b}))", "import math; math.lcm({a},{b})"),
        failing="lcm({a},{b})",
        hopeless="solve({a},{b})",
        wrong=("print({a}+{b})", "print({a}*{b})", "print(max({a},{b}))"),
    ),
    "remainder": Family(
        question="What is {a} mod {b}?",
        draw=_draw_from(range(100, 1000), range(3, 30)),
        answer=operator.mod,
        right=("print({a}%{b})", "{a}%{b}"),
        failing="mod({a},{b})",
        hopeless="solve({a},{b})",
        wrong=("print({a}//{b})", "print({a}-{b})", "print({a}+{b})"),
    ),
    "digit_sum": Family(
        question="What is the digit sum of {a}**{b}?",
        draw=_draw_from(range(2, 100), range(2, 20)),
        answer=_digit_sum,
        right=("print(sum(map(int,str({a}**{b}))))", "sum(map(int,str({a}**{b})))"),
        failing="sum({a}**{b})",
        hopeless="solve({a}**{b})",
        wrong=("print(sum(map(int,str({a}*{b}))))", "print(len(str({a}**{b})))", "print({a}*{b})"),
    ),
    "primes": Family(
        question="How many primes are below {a}?",
        draw=_draw_from(range(10, 100)),
        answer=_primes_below,
        right=(
            "print(sum(all(n%d for d in range(2,n)) for n in range(2,{a})))",
            "sum(all(n%d for d in range(2,n)) for n in range(2,{a}))",
        ),
        failing="primes({a})",
        hopeless="solve({a})",
        wrong=("print({a}//2)", "print({a}//3)", "print(len(range(2,{a})))"),
    ),
}


def _fill(template: str, operands: tuple[int, ...]) -> str:
    names = dict(zip("abc", operands, strict=False))
    expression = _EXPRESSIONS[operands[3]].format(**names) if len(operands) > 3 else ""
    return template.format(**names, e=expression)


def is_held_out(seed: int, family: str, operands: tuple[int, ...]) -> bool:
    """Whether these operands are the test's. Their order does not matter: gcd(12, 18) would give gcd(18, 12) away."""
    number = list(FAMILIES).index(family)
    return uniform(seed, number, *sorted(operands)) < TEST_SHARE


def draw_question(random: Random, seed: int, *, held_out: bool, family: str) -> Question:
    """A question of that side of the split."""
    kind = FAMILIES[family]
    while True:
        operands = kind.draw(random)
        if is_held_out(seed, family, operands) == held_out:
            return Question(family, operands, _fill(kind.question, operands), kind.answer(*operands))


def draw_questions(seed: int, *, held_out: bool) -> Iterator[Question]:
    """Without end, the families in turn."""
    random = Random(2 * seed + held_out)
    while True:
        for family in FAMILIES:
            yield draw_question(random, seed, held_out=held_out, family=family)


def questions(seed: int, count: int, *, held_out: bool) -> list[Question]:
    """`count` questions, no two alike; the families in turn until the small ones are used up.

    Raises UnusableInput if there are not so many.
    """
    chosen: dict[str, Question] = {}
    for question in islice(draw_questions(seed, held_out=held_out), 20 * count):
        chosen.setdefault(question.text, question)
        if len(chosen) == count:
            return list(chosen.values())
    side = "test" if held_out else "train"
    raise UnusableInput(f"tiny.num_{side}_questions = {count}: there are hardly more than {len(chosen)} different ones")
