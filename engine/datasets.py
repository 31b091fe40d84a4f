"""Questions with known answers, from JSONL or parquet, in any of the layouts that docs/data.md lists."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import polars

from configs.errors import UnusableInput
from policies.dialogue import last_boxed

Row = dict[str, Any]


class DatasetError(UnusableInput):
    """A data file that cannot be used: the file, the row (counted from 1) and the field, and what is wrong with it."""

    def __init__(self, path: Path, problem: str, *, row: int | None = None, field: str | None = None) -> None:
        place = ", ".join(part for part in (row and f"row {row}", field and f"field `{field}`") if part)
        super().__init__(f"{path}: {place}: {problem}" if place else f"{path}: {problem}")


class Problem(NamedTuple):
    name: str  # "FILE:ROW", unique within a run's data
    question: str
    ground_truth: str


def read_problems(path: Path) -> list[Problem]:
    """All rows of the file. Raises DatasetError at the first one that cannot be used."""
    return [_problem(path, number, row) for number, row in read_rows(path)]


def read_rows(path: Path) -> list[tuple[int, Row]]:
    """The rows with their numbers, blank lines left out. Raises DatasetError for a missing or empty file as well."""
    if not path.is_file():
        raise DatasetError(path, "no such file")
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DatasetError(path, f"unknown kind of file; known: {', '.join(readers)}")
    rows = list(readers[path.suffix](path))
    if not rows:
        raise DatasetError(path, "the file has no rows")
    return rows


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DatasetError(path, f"not JSON: {error}", row=number) from error
        if not isinstance(row, dict):
            raise DatasetError(path, "not a JSON object", row=number)
        yield number, cast(Row, row)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        frame = polars.read_parquet(path)
    except (polars.exceptions.PolarsError, OSError) as error:
        raise DatasetError(path, f"not a parquet file: {error}") from error
    yield from enumerate(frame.iter_rows(named=True), start=1)


# ---------------------------------------------------------------- one row


def _problem(path: Path, number: int, row: Row) -> Problem:
    field, question = _question(row)
    if not question.strip():
        raise DatasetError(path, "no question: a text is wanted here", row=number, field=field)
    field, answer = _ground_truth(row)
    if not answer:
        raise DatasetError(path, "no answer can be read from it", row=number, field=field)
    return Problem(f"{path.name}:{number}", question.strip(), answer)


def _question(row: Row) -> tuple[str, str]:
    """The field, and the question in it or "". A `prompt` may be chat messages: then its last user message counts,
    unless `extra_info` has the question without the instructions that were put around it."""
    for field in ("question", "problem", "Question", "Problem"):
        if row.get(field) is not None:
            return field, _text(row[field])
    prompt = row.get("prompt")
    if not isinstance(prompt, list):
        return "prompt" if "prompt" in row else "question", _text(prompt)
    bare = _text(_inside(row, "extra_info").get("question"))
    messages = [cast(Row, message) for message in cast(list[Any], prompt) if isinstance(message, dict)]
    asked = [_text(message.get("content")) for message in messages if message.get("role") == "user"]
    return "prompt", bare or (asked[-1] if asked else "")


def _ground_truth(row: Row) -> tuple[str, str]:
    """The field, and the answer in it or ""."""
    if row.get("reward_model") is not None:
        return "reward_model.ground_truth", _answer(_inside(row, "reward_model").get("ground_truth"))
    for field in ("answer", "Answer", "ground_truth"):
        if row.get(field) is not None:
            return field, _answer(row[field])
    solution = _text(row.get("solution"))
    return "solution" if "solution" in row else "answer", (last_boxed(solution) or "").strip()


def _inside(row: Row, field: str) -> Row:
    value = row.get(field)
    return cast(Row, value) if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _answer(value: object) -> str:
    """The bare answer: what stands after GSM8K's `####`, without thousands separators; 27.0 as "27"; "073" as "73"."""
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
