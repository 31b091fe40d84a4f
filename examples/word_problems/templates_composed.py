"""Composes further templates of the cold start of a start, up to two changes and a question.

A model that has seen few combinations memorizes them. Here each sentence occurs in many templates, and has the same
operation in all of them.
"""

import ast
from collections.abc import Iterator
from random import Random

import templates_test
from composed_sentences import GRAMMARS, WEIGHTS, Grammar, Sentence
from problem_templates import Template, derive_structure

NUM_TEMPLATES = 240
_SEED = 0
_MAX_OPERATIONS = 4
_TEST_STRUCTURES = {derive_structure(template.answer) for template in templates_test.TEMPLATES}


def compose_templates(random: Random) -> Iterator[Template]:
    """Compose an endless stream of templates, without the structures of the test."""
    while True:
        (grammar,) = random.choices(GRAMMARS, WEIGHTS)
        changes = random.sample(grammar.changes, random.choice((0, 1, 1, 1, 2)))
        sentences = [random.choice(grammar.starts), *changes, random.choice(grammar.questions)]
        template = _compose(grammar, sentences, random.choice(grammar.nouns))
        num_operations = sum(map(template.answer.count, ("+", "-", "*", "//")))
        if 0 < num_operations <= _MAX_OPERATIONS and derive_structure(template.answer) not in _TEST_STRUCTURES:
            yield template


def _compose(grammar: Grammar, sentences: list[Sentence], noun: str) -> Template:
    expression = "S"
    numbers: dict[str, range] = {}
    for sentence in sentences:
        is_factor = any(each in sentence.expression for each in ("S *", "S //", "- S"))
        inner = f"({expression})" if is_factor and any(each in expression for each in "+-") else expression
        expression = sentence.expression.replace("S", inner)
        numbers |= sentence.numbers
    text = " ".join(sentence.text for sentence in sentences).replace("{noun}", noun).replace("{many}", f"{{{noun}s}}")
    renamed = {f"{noun}s" if name == "many" else name: values for name, values in numbers.items()}
    answer = ast.unparse(ast.parse(expression.replace("many", f"{noun}s")))  # without superfluous brackets
    return Template(grammar.family, text, answer, renamed)


def _choose_templates() -> tuple[Template, ...]:
    chosen: dict[str, Template] = {}
    for template in compose_templates(Random(_SEED)):
        chosen.setdefault(template.text, template)
        if len(chosen) == NUM_TEMPLATES:
            return tuple(chosen.values())
    raise AssertionError


TEMPLATES = _choose_templates()
