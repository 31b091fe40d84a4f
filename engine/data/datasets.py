"""Reads questions with known answers, in the layouts of docs/data.md, and counts unusual questions."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from asterism.engine.data.data_files import BadRows, DatasetError, DatasetRow, RowFields, read_rows
from asterism.policies.dialogue.boxed_answers import extract_last_boxed

QUESTION_FIELDS = ("question", "problem", "Question", "Problem")
_ANSWER_FIELDS = ("answer", "Answer", "ground_truth")
QUESTION_COLUMNS = (
    *QUESTION_FIELDS,
    *_ANSWER_FIELDS,
    "prompt",
    "messages",
    "extra_info",
    "reward_model",
    "solution",
)
# instructions around every question of a published data set, with an answer format that the run would count as wrong
_WRAPPERS = tuple(
    (
        "Solve the following math problem step by step. The last line of your response should be of the form "
        f"Answer: {form} (without quotes) where $Answer is the answer to the problem.\n\n",
        '\n\nRemember to put your answer on its own line after "Answer:".',
    )
    for form in ("$Answer", "\\boxed{$Answer}")
)
_OTHER_ANSWER_FORMATS = ("last line of your", "answer: $answer", 'after "answer:"', "after ####", "<think>")
_THOUSANDS = re.compile(r"[-+$]*\d{1,3}(,\d{3})+(\.\d+)?[^\d,()\[\]{}]*")  # matches 1,234 and $1,234, but not (1, 2)
# Sign, digits without leading zeros, and decimals that are not all zero.
_NUMBER = re.compile(r"([-+\u2212]?)0*(\d{1,3}(?:,\d{3})+|\d+?)(?:\.0+|(\.\d+))?", re.ASCII)
# answers of proofs and of rows without an answer; "no solution" and "undefined" are real answers
_PLACEHOLDERS = frozenset(
    (
        *("", "?", "-", "--", "n/a", "na", "nan", "null", "none", "nil", "tbd", "todo", "unknown", "answer"),
        *("proof", "see proof", "proof required", "see solution", "solution", "see above", "missing"),
        *("not found", "not available", "no answer", "not applicable", "not provided"),
    )
)
_FRAMED_BOX = re.compile(r"\\(?:fbox|boxed)\s*\{")


class DatasetProblem(NamedTuple):
    name: str  # "FILE:ROW", unique within a run's data
    question: str
    ground_truth: str
    fields: RowFields  # all columns, if RowLayout.all_columns is set
    was_wrapped: bool = False  # an instruction of a published data set for another answer format was removed
    was_cut: bool = False  # the question leaves out a system text or earlier turns of its prompt


class RowLayout(NamedTuple):
    """The required fields of a row, and the columns to read."""

    all_columns: bool = False  # False: from parquet files, only the columns of question and answer are read
    needs_question: bool = True
    needs_answer: bool = True  # False: all rows are used unchanged, also repeated rows

    @property
    def is_plain(self) -> bool:
        """Return whether each row is a question with an answer."""
        return self.needs_question and self.needs_answer


PLAIN_ROWS = RowLayout()


@dataclass
class QuestionReport:
    """Counts of the unusual questions of one file, complete after the last question is read."""

    training: "QuestionReport | None" = None  # for test questions: the complete report of the training questions
    bad_rows: BadRows = field(default_factory=BadRows)  # skipped rows
    num_rows: int = 0
    num_questions: int = 0
    num_unwrapped: int = 0
    num_cut: int = 0
    first_cut: str = ""  # name of the first cut problem
    num_repeated: int = 0  # repeated questions with the same answer, dropped from training questions
    num_conflicting: int = 0  # repeated questions with another answer
    num_overlapping: int = 0  # test questions that are also training questions
    num_other_format: int = 0
    first_other_format: str = ""  # name of the first problem with another answer format
    num_placeholders: int = 0  # questions with a placeholder as the answer
    first_placeholder: str = ""  # answer and name of the first problem with a placeholder
    _questions: set[bytes] = field(default_factory=set[bytes])  # digests, because texts take ten times the memory
    _problems: set[bytes] = field(default_factory=set[bytes])

    def add_problem(self, problem: DatasetProblem) -> bool:
        """Count the problem; return whether the run uses it."""
        question = blake2b(problem.question.encode(), digest_size=16).digest()
        both = blake2b(problem.ground_truth.encode(), key=question, digest_size=16).digest()
        repeated = both in self._problems
        self.num_rows += 1
        self.num_unwrapped += problem.was_wrapped
        if problem.was_cut:
            self.num_cut += 1
            self.first_cut = self.first_cut or problem.name
        self.num_repeated += repeated
        if repeated and self.training is None:
            return False
        self.num_questions += 1
        self.num_conflicting += not repeated and question in self._questions
        self.num_overlapping += self.training is not None and question in self.training._questions
        lower = problem.question.lower()
        if any(text in lower for text in _OTHER_ANSWER_FORMATS):
            self.num_other_format += 1
            self.first_other_format = self.first_other_format or problem.name
        if problem.ground_truth.strip(" .").casefold() in _PLACEHOLDERS:
            self.num_placeholders += 1
            self.first_placeholder = self.first_placeholder or f"{problem.ground_truth!r} in {problem.name}"
        self._questions.add(question)
        self._problems.add(both)
        return True

    def count_row(self) -> None:
        """Count a row of a task that uses all rows."""
        self.num_rows += 1
        self.num_questions += 1

    def describe(self) -> str:
        parts = [f"{self.num_questions:,} questions"]
        if self.num_unwrapped:
            parts.append(f"removed the instruction for another answer format from {self.num_unwrapped:,} rows")
        if self.num_repeated:
            verb = "dropped" if self.training is None else "kept"
            parts.append(f"{verb} {self.num_repeated:,} rows that repeat a question with its answer")
        return "; ".join(parts)

    def list_warnings(self) -> list[str]:
        warnings: list[str] = []
        if errors := self.bad_rows.errors:
            warnings.append(f"{len(errors):,} unusable rows are skipped, the first: {errors[0]}")
        if self.num_cut:
            warnings.append(
                f"{self.num_cut:,} prompts have a system text or earlier turns, which the question leaves out: only the "
                f"last text of the user is used, the first in {self.first_cut}"
            )
        if self.num_conflicting:
            warnings.append(f"{self.num_conflicting:,} rows repeat a question with another answer")
        if self.num_overlapping:
            warnings.append(f"{self.num_overlapping:,} test questions are also training questions")
        if self.num_other_format:
            warnings.append(
                f"{self.num_other_format:,} questions ask for another answer format than the run does, "
                f"the first in {self.first_other_format}"
            )
        if self.num_placeholders:
            warnings.append(
                f"{self.num_placeholders:,} answers are placeholders, which no response can equal, "
                f"the first is {self.first_placeholder}; remove the rows"
            )
        return warnings


def make_training_report(max_bad_rows: int) -> QuestionReport:
    """Make a report with the limit data.max_bad_rows. Only unusable training questions are skipped."""
    return QuestionReport(bad_rows=BadRows(max_bad_rows, "data.max_bad_rows"))


def read_problems(
    path: Path, report: QuestionReport | None = None, max_rows: int | None = None, layout: RowLayout = PLAIN_ROWS
) -> Iterator[DatasetProblem]:
    """Yield the problems of the file or folder. Repeated problems are dropped, except among test questions.

    Raises the first row's DatasetError if all rows are unusable, and UnusableInput above the limit of bad rows.
    """
    report = report or QuestionReport()
    for row in islice(read_rows(path, () if layout.all_columns else QUESTION_COLUMNS, report.bad_rows), max_rows):
        try:
            problem = parse_problem(row, layout)
        except DatasetError as error:
            report.bad_rows.add(error)
            continue
        if not layout.is_plain:
            report.count_row()
            yield problem
            continue
        if report.add_problem(problem):
            yield problem
    if report.bad_rows.errors and not report.num_rows:
        raise report.bad_rows.errors[0]


# ---------------------------------------------------------------- one row


def parse_problem(row: DatasetRow, layout: RowLayout = PLAIN_ROWS) -> DatasetProblem:
    """Parse a row; remove a published data set's instruction from a plain question. Raises DatasetError."""
    key, question, was_cut = _find_question(row.fields)
    if not question.strip() and layout.needs_question:
        raise DatasetError(row.path, "no question; expected a non-empty string", row=row.number, field=key)
    key, value = _find_ground_truth(row.fields)
    if not (answer := _parse_answer(value)) and layout.needs_answer:
        found = "missing, or without an answer" if value is None or isinstance(value, str) else f"got {value!r:.40}"
        expected = "" if value is None or isinstance(value, str) else "; expected one answer, as text or a number"
        raise DatasetError(row.path, found + expected, row=row.number, field=key)
    question = question.strip()
    bare = remove_wrapper(question) if layout.is_plain else question
    return DatasetProblem(f"{row.path.name}:{row.number}", bare, answer, row.fields, bare != question, was_cut)


def remove_wrapper(question: str) -> str:
    """Return the question without an instruction for an answer format that the run would count as wrong."""
    for prefix, suffix in _WRAPPERS:
        if question.startswith(prefix) and question.endswith(suffix):
            return question.removeprefix(prefix).removesuffix(suffix).strip()
    return question


def _find_question(row: RowFields) -> tuple[str, str, bool]:
    """Return the field, the question or "", and whether the question leaves out texts of the prompt.

    The question of chat messages (in `prompt` or `messages`, also as JSON text) is `extra_info.question`, which has no
    instructions around it, or the last user message.
    """
    for key in QUESTION_FIELDS:
        if row.get(key) is not None:
            return key, _as_text(row[key]), False
    key = "prompt" if row.get("prompt") is not None else "messages"
    prompt = _parse_messages(row.get(key))
    if not isinstance(prompt, list):
        return "prompt" if "prompt" in row else "question", _as_text(row.get("prompt")), False
    if bare := _as_text(_get_object(row, "extra_info").get("question")):
        return key, bare, False
    messages = [cast(RowFields, message) for message in cast(list[Any], prompt) if isinstance(message, dict)]
    texts = [(message.get("role"), _as_text(message.get("content"))) for message in messages]
    asked = [text for role, text in texts if role == "user"]
    given = [text for role, text in texts if text.strip() and role != "assistant"]
    return key, asked[-1] if asked else "", len(given) > 1


def _parse_messages(prompt: object) -> object:
    """Parse messages in JSON text, which parquet files of some data sets contain."""
    if not isinstance(prompt, str) or not prompt.lstrip().startswith("[{"):
        return prompt
    try:
        messages = msgspec.json.decode(prompt)
    except msgspec.DecodeError:
        return prompt
    has_roles = all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in messages)
    return messages if has_roles else prompt


def _find_ground_truth(row: RowFields) -> tuple[str, object]:
    """Return the answer's field, and the answer as in the file."""
    if (value := _get_object(row, "reward_model").get("ground_truth")) is not None:
        return "reward_model.ground_truth", value
    for key in _ANSWER_FIELDS:
        if row.get(key) is not None:
            return key, row[key]
    if "solution" in row:
        return "solution", _extract_boxed(_as_text(row["solution"]))
    absent = "answer" if row.get("reward_model") is None else "reward_model.ground_truth"
    return absent, None


def _extract_boxed(solution: str) -> str | None:
    """Extract the last box as the MATH data set does: also \\fbox{2}, and \\boxed 2 up to a dollar sign."""
    boxed = extract_last_boxed(solution)
    if boxed is not None:
        return boxed
    _, box, text = solution.rpartition("\\boxed ")
    return text.partition("$")[0].strip() if box else None


def _get_object(row: RowFields, field: str) -> RowFields:
    value = row.get(field)
    return cast(RowFields, value) if isinstance(value, dict) else {}


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _unwrap(text: str) -> str:
    r"""Return the text without dollar signs and one `\boxed{}` around all of it."""
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = text[len(opening) : -len(closing)]
        if inner.strip() and text == opening + inner + closing and "$" not in inner:
            return _unwrap(inner.strip())
    box = _FRAMED_BOX.match(text)
    if box is not None and _extract_boxed(text) == (content := text[box.end() : -1]) and text.endswith("}"):
        return _unwrap(content.strip())
    return text


def _parse_answer(value: object) -> str:
    r"""Return the answer without `####`, `\boxed{}` and math delimiters, and a number without separators and zeros.

    Values other than texts and numbers give "".
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    if isinstance(value, float):
        if not math.isfinite(value):
            return ""
        return str(int(value)) if value.is_integer() else str(value)
    text = str(value)
    if "####" in text:
        text = text.rsplit("####", 1)[1].strip()
        text = text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
    text = _unwrap(text.strip())
    number = _NUMBER.fullmatch(text)
    if number is None:
        return text
    sign, whole, decimals = number.groups(default="")
    minus = "-" if sign in ("-", "\u2212") else ""
    return minus + whole.replace(",", "") + decimals
