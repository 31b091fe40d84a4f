"""Draws word problems from templates, and derives the structure of a template's answer.

A template's text has placeholders for numbers, words, `{name}` and `{other}` (two people), and `{she}`, `{She}` and
`{her}` (pronouns of `{name}`). All numbers are at least 2, so that every noun behind a number is a plural.
"""

import ast
import re
import string
from collections.abc import Mapping
from functools import cache
from random import Random
from types import CodeType
from typing import NamedTuple

WOMEN = ("Ada", "Bella", "Clara", "Dora", "Emma", "Flora", "Greta", "Hanna", "Ines", "Julia", "Lena", "Mona", "Nora")
MEN = ("Adam", "Ben", "Carl", "David", "Emil", "Felix", "Georg", "Hugo", "Jonas", "Leo", "Max", "Oscar", "Paul")
MAX_ANSWER = 5000
_MOST_TRIES = 2000  # draws of all numbers of one problem
Numbers = Mapping[str, int]


class Template(NamedTuple):
    family: str  # the subject, such as "travel"
    text: str
    answer: str  # a Python expression of the numbers; its value is a positive integer
    # Values by name. An expression of earlier numbers is their result, such as a total that can be divided equally.
    numbers: Mapping[str, range | tuple[int, ...] | str]
    words: Mapping[str, tuple[str, ...]] = {}  # regular nouns that begin with a consonant

    @property
    def shown_numbers(self) -> tuple[str, ...]:
        """The numbers in the text, in their order there."""
        fields = (field for _, field, _, _ in string.Formatter().parse(self.text) if field)
        return tuple(dict.fromkeys(field for field in fields if field in self.numbers))

    @property
    def distractors(self) -> tuple[str, ...]:
        """The numbers in the text that the answer does not need."""
        needed = list_names(self.answer)
        return tuple(name for name in self.shown_numbers if name not in needed)


class NoSuitableNumbers(Exception):
    """Few or none of the numbers of a template make a problem. `str(error)` is the template's text."""


class Problem(NamedTuple):
    template: Template
    question: str
    numbers: Numbers  # the numbers in the question
    answer: int


def draw_problem(random: Random, template: Template) -> Problem:
    """Draw a problem whose numbers differ from each other and are at least 2, as the answer is. Divisions are exact.

    Raises NoSuitableNumbers for a template whose numbers nearly never have this property.
    """
    for _ in range(_MOST_TRIES):
        drawn: dict[str, int] = {}
        for name, source in template.numbers.items():
            drawn[name] = evaluate(source, drawn) if isinstance(source, str) else random.choice(source)
        shown = {key: drawn[key] for key in template.shown_numbers}
        answer = evaluate(template.answer, drawn)
        is_exact = answer == evaluate(template.answer.replace("//", "/"), drawn)
        if (
            is_exact
            and min(answer, *shown.values()) >= 2
            and answer <= MAX_ANSWER
            and len({*shown.values()}) == len(shown)
        ):
            return Problem(template, template.text.format(**drawn, **_draw_words(random, template)), shown, answer)
    raise NoSuitableNumbers(template.text)


def _draw_words(random: Random, template: Template) -> dict[str, str]:
    words = {key: random.choice(choices) for key, choices in template.words.items()}
    women = random.random() < 0.5
    name, other = random.sample(WOMEN if women else MEN, 2)
    pronouns = ("she", "She", "her") if women else ("he", "He", "his")
    return words | {"name": name, "other": other} | dict(zip(("she", "She", "her"), pronouns, strict=True))


def evaluate(expression: str, numbers: Numbers) -> int:
    """Compute an expression of a template."""
    return eval(_compile(expression), {"__builtins__": {}}, dict(numbers))


@cache
def _compile(expression: str) -> CodeType:
    return compile(expression, "<template>", "eval")


def list_names(expression: str) -> list[str]:
    """List the numbers in an expression in their order there."""
    names = (node for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name))
    return [node.id for node in sorted(names, key=lambda node: node.col_offset)]


def derive_structure(expression: str) -> str:
    """Return the operations of an expression. Every number is `x`; `a + b` equals `b + a`, and `a - b - c` equals
    `a - (b + c)`."""
    return _describe(ast.parse(expression, mode="eval").body)


def _describe(node: ast.expr) -> str:
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            parts, signs = _flatten(node, ast.Add, ast.Sub), "+-"
        case ast.BinOp(op=ast.Mult() | ast.FloorDiv()):
            parts, signs = _flatten(node, ast.Mult, ast.FloorDiv), "*/"
        case _:
            return "x"
    return f"({' '.join(sorted(signs[inverse] + _describe(part) for part, inverse in parts))})"


def _flatten(node: ast.expr, plus: type[ast.operator], minus: type[ast.operator]) -> list[tuple[ast.expr, bool]]:
    """List the parts of a sum or a product, with True for parts that are subtracted or divided by."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, plus | minus):
        return [(node, False)]
    right = _flatten(node.right, plus, minus)
    return [
        *_flatten(node.left, plus, minus),
        *((part, inverse != isinstance(node.op, minus)) for part, inverse in right),
    ]


def list_ngrams(text: str, size: int) -> set[tuple[str, ...]]:
    """List the word n-grams of a text with names and numbers as `N`, and of the text without them."""
    words = [
        "N" if word in WOMEN or word in MEN or word.isdigit() or "{" in word else word.lower()
        for word in re.findall(r"[\w{}]+", text)
    ]
    rest = [word for word in words if word != "N"]
    return {tuple(each[n : n + size]) for each in (words, rest) for n in range(len(each) - size + 1)}
