"""Reads questions with known answers from JSONL or parquet, in the layouts of docs/data.md."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import polars

from configs.errors import UnusableInput
from policies.dialogue.parse_turn import extract_last_boxed

DatasetRow = dict[str, Any]


class DatasetError(UnusableInput):
    """An unusable data file: the message names the file, row (from 1), field and problem."""

    def __init__(self, path: Path, problem: str, *, row: int | None = None, field: str | None = None) -> None:
        place = ", ".join(part for part in (row and f"row {row}", field and f"field `{field}`") if part)
        super().__init__(f"{path}: {place}: {problem}" if place else f"{path}: {problem}")


class DatasetProblem(NamedTuple):
    name: str  # "FILE:ROW", unique within a run's data
    question: str
    ground_truth: str


def read_problems(path: Path) -> list[DatasetProblem]:
    """All rows of the file. Raises DatasetError at the first unusable row."""
    return [_parse_problem(path, number, row) for number, row in read_rows(path)]


def read_rows(path: Path) -> list[tuple[int, DatasetRow]]:
    """(row number, row) pairs, without blank lines. Raises DatasetError for an empty file too."""
    if not path.is_file():
        raise DatasetError(path, "no such file")
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise DatasetError(path, f"unknown file extension; use one of {', '.join(readers)}")
    rows = list(readers[path.suffix](path))
    if not rows:
        raise DatasetError(path, "the file has no rows")
    return rows


def _read_jsonl(path: Path) -> Iterator[tuple[int, DatasetRow]]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DatasetError(path, f"not JSON: {error}", row=number) from error
        if not isinstance(row, dict):
            raise DatasetError(path, "not a JSON object", row=number)
        yield number, cast(DatasetRow, row)


def _read_parquet(path: Path) -> Iterator[tuple[int, DatasetRow]]:
    try:
        frame = polars.read_parquet(path)
    except (polars.exceptions.PolarsError, OSError) as error:
        raise DatasetError(path, f"not a parquet file: {error}") from error
    yield from enumerate(frame.iter_rows(named=True), start=1)


# ---------------------------------------------------------------- one row


def _parse_problem(path: Path, number: int, row: DatasetRow) -> DatasetProblem:
    field, question = _find_question(row)
    if not question.strip():
        raise DatasetError(path, "no question; expected a non-empty string", row=number, field=field)
    field, answer = _find_ground_truth(row)
    if not answer:
        raise DatasetError(path, "missing, or without an answer", row=number, field=field)
    return DatasetProblem(f"{path.name}:{number}", question.strip(), answer)


def _find_question(row: DatasetRow) -> tuple[str, str]:
    """(field, question or ""). For chat messages in `prompt`: `extra_info.question`, without the
    instructions around it, or else the last user message."""
    for field in ("question", "problem", "Question", "Problem"):
        if row.get(field) is not None:
            return field, _as_text(row[field])
    prompt = row.get("prompt")
    if not isinstance(prompt, list):
        return "prompt" if "prompt" in row else "question", _as_text(prompt)
    bare = _as_text(_get_object(row, "extra_info").get("question"))
    messages = [cast(DatasetRow, message) for message in cast(list[Any], prompt) if isinstance(message, dict)]
    asked = [_as_text(message.get("content")) for message in messages if message.get("role") == "user"]
    return "prompt", bare or (asked[-1] if asked else "")


def _find_ground_truth(row: DatasetRow) -> tuple[str, str]:
    """(field, answer or "")."""
    if row.get("reward_model") is not None:
        return "reward_model.ground_truth", _parse_answer(_get_object(row, "reward_model").get("ground_truth"))
    for field in ("answer", "Answer", "ground_truth"):
        if row.get(field) is not None:
            return field, _parse_answer(row[field])
    solution = _as_text(row.get("solution"))
    return "solution" if "solution" in row else "answer", (extract_last_boxed(solution) or "").strip()


def _get_object(row: DatasetRow, field: str) -> DatasetRow:
    value = row.get(field)
    return cast(DatasetRow, value) if isinstance(value, dict) else {}


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _parse_answer(value: object) -> str:
    """The text after GSM8K's `####` without thousands separators; 27.0 as "27"; "073" as "73"."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    if isinstance(value, float):
        if not math.isfinite(value):
            return ""
        return str(int(value)) if value.is_integer() else str(value)
    text = str(value)
    if "####" in text:
        text = text.rsplit("####", 1)[1].replace(",", "")
    text = text.strip()
    return text.lstrip("0") or "0" if text.isascii() and text.isdigit() else text
