"""Generate random word problems with numeric answers, and copies that cleaning must find."""

from collections.abc import Iterator
from random import Random
from typing import Literal, NamedTuple

Defect = Literal["", "duplicate", "near_duplicate", "overlap"]

_NAMES, _THINGS, _PLACES, _VERBS = map(
    str.split,
    (
        "Ada Ben Cora Dan Ella Finn Gita Hugo Iris Jon Kira Leo Mona Nils Olga Paul Rosa Sam Tara Yusuf",
        "apples books coins stamps tickets bottles flowers shirts cookies pencils tiles chairs letters eggs",
        "market school farm library garden station museum bakery harbour workshop kitchen office",
        "buys sells finds packs counts collects delivers stores paints repairs borrows returns",
    ),
)
_TIMES = (
    *("on Monday", "in spring", "every week", "before noon", "after work"),
    *("during the fair", "at night", "last year"),
)
_ENDINGS = (
    "How many {thing} are left at the {place}?",
    "What is the total number of {thing} that {name} has?",
    "How many more {thing} does {name} need for the {place}?",
    "Find the number of {thing} that {name} {verb} in {number} days.",
)
_FILLERS = ["only", "really", "new", "small", "old", "happy", "also", "quickly", "then", "big"]


# The frame of the questions in a published data set.
WRAPPER = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your "
    'answer on its own line after "Answer:".'
)


class WordProblem(NamedTuple):
    question: str
    answer: str
    defect: Defect = ""


def draw_word_problems(random: Random) -> Iterator[WordProblem]:
    """Yield problems of three to five sentences endlessly. The answers do not follow from the questions."""
    while True:
        sentences = [
            f"{random.choice(_NAMES)} {random.choice(_VERBS)} {random.randint(2, 999)} {random.choice(_THINGS)} at the "
            f"{random.choice(_PLACES)} {random.choice(_TIMES)}."
            for _ in range(random.randint(2, 4))
        ]
        words = {"name": _NAMES, "thing": _THINGS, "place": _PLACES, "verb": _VERBS}
        chosen = {key: random.choice(values) for key, values in words.items()}
        sentences.append(random.choice(_ENDINGS).format(**chosen, number=random.randint(2, 30)))
        yield WordProblem(" ".join(sentences), str(random.randint(0, 99_999)))


def copy_exactly(problem: WordProblem, random: Random) -> WordProblem:
    """Copy a problem exactly, or with changed case, spaces or punctuation."""
    question = problem.question
    copies = (question, question.upper(), f"  {question.replace(' ', '  ')}", question.replace(".", " ;"))
    return WordProblem(random.choice(copies), problem.answer, "duplicate")


def copy_nearly(problem: WordProblem, random: Random, defect: Defect = "near_duplicate") -> WordProblem:
    """Copy a problem with one word in fifteen replaced, added or removed, but the same numbers."""
    words = problem.question.split()
    for _ in range(max(1, len(words) // 15)):
        place = random.choice([number for number, word in enumerate(words) if word.isalpha()])
        edits = ([random.choice(_FILLERS)], [words[place], random.choice(_FILLERS)], [])
        words[place : place + 1] = random.choice(edits)
    return WordProblem(" ".join(words), problem.answer, defect)


def embed(problem: WordProblem) -> WordProblem:
    """Embed a problem in a longer text."""
    text = f"Solve this problem with care. {problem.question} Explain each step and give the final number."
    return WordProblem(text, problem.answer, "overlap")
