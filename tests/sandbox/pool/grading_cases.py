"""Read grading_cases.jsonl: for each form of an answer, a reason, a truth, correct answers and wrong answers."""

from pathlib import Path
from typing import NamedTuple

import msgspec

_FILE = Path(__file__).with_suffix(".jsonl")


class GradingForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    form: str
    reason: str
    truth: str
    correct: tuple[str, ...]
    wrong: tuple[str, ...]


class GradingCase(NamedTuple):
    form: str
    truth: str
    answer: str
    is_correct: bool


GRADING_FORMS = tuple(msgspec.json.decode(line, type=GradingForm) for line in _FILE.read_bytes().splitlines())
GRADING_CASES = tuple(
    GradingCase(each.form, each.truth, answer, is_correct)
    for each in GRADING_FORMS
    for answers, is_correct in ((each.correct, True), (each.wrong, False))
    for answer in answers
)
