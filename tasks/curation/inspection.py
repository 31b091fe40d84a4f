"""Reports the contents that a run reads from a data file: `asterism data inspect`."""

import sys
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

import msgspec

from asterism.engine.data.data_files import (
    BadRows,
    DatasetError,
    DatasetRow,
    RowFields,
    detect_encoding,
    list_data_files,
    read_rows,
)
from asterism.engine.data.datasets import QUESTION_FIELDS, QuestionReport, parse_problem
from asterism.engine.data.row_layouts import read_dialogue
from asterism.engine.data.sft_dialogues import PLAIN_FILE
from asterism.tasks.curation.answer_check import AnswerKind, is_answer_of_kind

_MAX_LISTED = 20
_MAX_CHECKED_ANSWERS = 1000  # distinct answers other than numbers, for each of which the verifier needs about 5 ms
_DIALOGUE_COLUMNS = ("messages", "conversations")
_ROLE_KEYS, _USER_ROLES = ("role", "from"), {"user", "human"}


class ColumnSummary(msgspec.Struct):
    types: dict[str, int]  # number of values by type
    num_missing: int  # number of missing or null values


class FileInspection(msgspec.Struct):
    path: str
    encodings: dict[str, str]  # by file; empty for parquet
    num_rows: int
    columns: dict[str, ColumnSummary]
    unusable: list[str]  # messages of the first unusable rows
    num_unusable: int
    num_dialogues: int  # rows for the cold start
    answer_kinds: dict[str, int]  # integer, number, expression, sentence
    question_characters: list[int]  # median, 95th percentile, maximum
    counts: str  # counts of questions in the form that the start of a run prints
    warnings: list[str]
    unreadable_answers: list[str]
    num_unchecked_answers: int


def inspect_data(path: Path, find_unreadable: Callable[[Collection[str]], list[str]]) -> FileInspection:
    """Inspect a whole file or folder. Raises DatasetError for a file or folder that cannot be read."""
    return _Inspection(path).run(find_unreadable)


class _Inspection:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._bad_rows = BadRows(sys.maxsize)
        self._columns: dict[str, Counter[str]] = {}
        self._report = QuestionReport()
        self._lengths: Counter[int] = Counter()
        self._kinds: Counter[str] = Counter()
        self._other_answers: dict[str, None] = {}  # expressions, in order
        self._num_rows = self._num_dialogues = 0
        self._num_unusable = 0  # unusable rows that could be read

    def run(self, find_unreadable: Callable[[Collection[str]], list[str]]) -> FileInspection:
        files = list_data_files(self._path)
        encodings = {file.name: detect_encoding(file) for file in files}
        for row in read_rows(self._path, bad_rows=self._bad_rows):
            self._num_rows += 1
            self._count_columns(row.fields)
            try:
                self._read_row(row)
            except DatasetError as error:
                self._bad_rows.add(error)
                self._num_unusable += 1
        self._num_rows += len(self._bad_rows.errors) - self._num_unusable
        return self._summarize(encodings, find_unreadable)

    def _read_row(self, row: DatasetRow) -> None:
        """Read a row as a dialogue, as a question, or as both, as in sets with questions, solutions and messages."""
        if _is_dialogue(row.fields):
            self._num_dialogues += 1
            read_dialogue(row, PLAIN_FILE)
            if not any(row.fields.get(name) for name in QUESTION_FIELDS):
                return
        problem = parse_problem(row)
        self._report.add_problem(problem)
        self._lengths[len(problem.question)] += 1
        self._count_answer(problem.ground_truth)

    def _count_columns(self, fields: RowFields) -> None:
        for name, value in fields.items():
            types = self._columns.setdefault(name, Counter())
            if value is not None:
                types[type(value).__name__] += 1

    def _count_answer(self, answer: str) -> None:
        kinds: dict[AnswerKind, str] = {"integer": "integer", "number": "number", "any": "expression"}
        kind = next((name for kind, name in kinds.items() if is_answer_of_kind(answer, kind)), "sentence")
        self._kinds[kind] += 1
        if kind == "expression":
            self._other_answers[answer] = None

    def _summarize(
        self, encodings: dict[str, str], find_unreadable: Callable[[Collection[str]], list[str]]
    ) -> FileInspection:
        checked = list(self._other_answers)[:_MAX_CHECKED_ANSWERS]
        errors = self._bad_rows.errors
        return FileInspection(
            path=str(self._path),
            encodings=encodings,
            num_rows=self._num_rows,
            columns={
                name: ColumnSummary(dict(types), self._num_rows - types.total())
                for name, types in self._columns.items()
            },
            unusable=[str(error) for error in errors[:_MAX_LISTED]],
            num_unusable=len(errors),
            num_dialogues=self._num_dialogues,
            answer_kinds=dict(self._kinds),
            question_characters=[_find_quantile(self._lengths, share) for share in (0.5, 0.95, 1.0)],
            counts=self._report.describe(),
            warnings=self._report.list_warnings(),
            unreadable_answers=find_unreadable(checked) if checked else [],
            num_unchecked_answers=len(self._other_answers) - len(checked),
        )


def _is_dialogue(fields: RowFields) -> bool:
    """Return whether the row has messages that do not end with the user's, or messages in `input` with an `output`."""
    for name in _DIALOGUE_COLUMNS:
        messages = fields.get(name)
        if isinstance(messages, list) and messages:
            last = cast(list[Any], messages)[-1]
            return isinstance(last, dict) and not _USER_ROLES & {cast(RowFields, last).get(key) for key in _ROLE_KEYS}
    return isinstance(fields.get("input"), list) and fields.get("output") is not None


def _find_quantile(counts: Counter[int], share: float) -> int:
    """Return the least value that at least `share` of all values do not exceed, or 0 without values."""
    passed, total = 0, counts.total()
    for value in sorted(counts):
        passed += counts[value]
        if passed >= share * total:
            return value
    return 0
