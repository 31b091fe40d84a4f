"""Composes more templates for the cold start: a start, up to two changes and a question.

A model that has seen few sentences memorizes them instead of learning what a text means. So the words of a sentence
vary, and each sentence occurs in many templates with the same operation.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from random import Random

import templates_rl
import templates_test
from composed_quantities import ASIDES, GRAMMARS, WEIGHTS
from composed_sentences import Grammar, Sentence
from composed_words import BOXES, PEOPLE, ROLES, THINGS, WORDS
from problem_templates import Template, derive_structure, draw_problem, list_ngrams

_MAX_OPERATIONS = 4
_ASIDE_SHARE = 0.12
_TEST_STRUCTURES = {derive_structure(template.answer) for template in templates_test.TEMPLATES}
# No question shares six words in a row with the templates of RL, nor five with those of the test.
_FOREIGN_NGRAMS = {
    size: frozenset(
        ngram
        for template in templates
        for text in (template.text, *(draw_problem(Random(seed), template).question for seed in range(40)))
        for ngram in list_ngrams(text, size)
    )
    for size, templates in ((6, templates_rl.TEMPLATES), (5, templates_test.TEMPLATES))
}
_NAMES = (
    ("first", "each"),
    ("second", "part"),
    ("third", "piece"),
    ("final", "last"),
)  # names of the numbers, by sentence
# `<thing>s` is the plural of each of these.
_LISTS = WORDS | {"thing": tuple(thing for thing in THINGS if thing != "sandwich")}


def compose_templates(random: Random) -> Iterator[Template]:
    """Compose templates without end, but not with structures of the test, nor with word sequences of other sets."""
    while True:
        (grammar,) = random.choices(GRAMMARS, WEIGHTS)
        changes = random.sample(grammar.changes, random.choice((0, 1, 1, 1, 2)))
        sentences = [random.choice(grammar.starts), *changes, random.choice(grammar.questions)]
        template = _compose(random, grammar, sentences)
        num_operations = sum(map(template.answer.count, ("+", "-", "*", "//")))
        if not 0 < num_operations <= _MAX_OPERATIONS or derive_structure(template.answer) in _TEST_STRUCTURES:
            continue
        if not any(list_ngrams(template.text, size) & ngrams for size, ngrams in _FOREIGN_NGRAMS.items()):
            yield template


def _compose(random: Random, grammar: Grammar, sentences: Sequence[Sentence]) -> Template:
    expression, texts = "S", list[str]()
    numbers: dict[str, range] = {}
    thing, role = random.choice(grammar.things), random.choice((None, random.choice(ROLES)))
    words = {"thing": thing, "things": _pluralize(thing)}
    for sentence, (a, b) in zip(sentences, (*_NAMES[: len(sentences) - 1], _NAMES[-1]), strict=True):
        person, box = random.choice(PEOPLE), random.choice(BOXES)
        words |= {"person": person, "people": _pluralize(person), "box": box, "boxes": _pluralize(box)}
        is_first = not texts
        words |= _name_subject(role, is_first=is_first)
        texts.append(_expand(random, sentence.text, words | {"a": f"{{{a}}}", "b": f"{{{b}}}"}))
        expression = _apply(sentence.expression, expression, {"a": a, "b": b})
        numbers |= {name: values for name, values in ((a, sentence.a), (b, sentence.b)) if f"{{{name}}}" in texts[-1]}
    if random.random() < _ASIDE_SHARE:
        texts.insert(0, _expand(random, random.choice(ASIDES), {"x": "{aside}"}))
        numbers["aside"] = range(5, 60)
    return Template(grammar.family, " ".join(texts), ast.unparse(ast.parse(expression)), numbers)


def _pluralize(noun: str) -> str:
    if noun == "child":
        return "children"
    if noun.endswith("y") and noun[-2] not in "aeo":
        return f"{noun[:-1]}ies"
    return noun + ("es" if noun.endswith(("x", "s", "ch")) else "s")


def _name_subject(role: str | None, *, is_first: bool) -> dict[str, str]:
    if role is None:
        return {"who": "{name}", "Who": "{name}"}
    return {"who": f"{'a' if is_first else 'the'} {role}", "Who": f"{'A' if is_first else 'The'} {role}"}


def _expand(random: Random, text: str, words: Mapping[str, str]) -> str:
    """Replace the alternatives and the words; `{name}` and `{other}` remain."""
    text = re.sub(r"\[([^]]*)\]", lambda match: random.choice(match[1].split("|")), text)
    text = re.sub(r"<(\w+)>", lambda match: random.choice(_LISTS[match[1]]), text)
    text = re.sub(r"\{(\w+)\}", lambda match: words.get(match[1], match[0]), text)
    return re.sub(r"\s+", " ", text)


def _apply(operation: str, expression: str, names: Mapping[str, str]) -> str:
    """Return the expression after a sentence, with brackets where the operation needs them."""
    is_factor = any(each in operation for each in ("S *", "S //", "- S"))
    inner = f"({expression})" if is_factor and re.search("[-+]", expression) else expression
    return re.sub(r"\b[abS]\b", lambda match: names.get(match[0], inner), operation)
