"""Reads rows from JSONL, JSON, CSV and parquet files, compressed files, and folders of parts (docs/data.md)."""

import codecs
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import check_file

RowFields = dict[str, Any]

_PART_EXTENSIONS = (".parquet", ".jsonl", ".jsonl.gz")
_MAX_CSV_CHARACTERS = 2**31 - 1  # limit per CSV value; some solutions exceed the default of 2**17
_BLOCK_ROWS = 131_072  # rows of a parquet file that are in memory at once
_NUMBERED_PART = re.compile(r"(.+?)-\d+-of-(\d+)(?:-[0-9a-f]+)?\.")  # matches train-00000-of-00003.parquet
_SPLIT = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval)(?![a-z])")  # matches gsm8k_train.jsonl
_REMOVED_ROWS = ".removed.jsonl"  # end of files that `asterism data clean` writes
_BYTE_ORDER_MARKS = {  # UTF-32 first: its mark begins with the mark of UTF-16
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


class DatasetError(UnusableInput):
    """An unusable data file. The message names the file, row (from 1), field and problem."""

    def __init__(self, path: Path, problem: str, *, row: int | None = None, field: str | None = None) -> None:
        place = ", ".join(part for part in (row and f"row {row}", field and f"field `{field}`") if part)
        super().__init__(f"{path}: {place}: {problem}" if place else f"{path}: {problem}")


class RowDefect(DatasetError):
    """An unusable row with a named kind of defect; messages count the rows of each kind."""

    def __init__(
        self, kind: str, path: Path, problem: str, *, row: int | None = None, field: str | None = None
    ) -> None:
        super().__init__(path, problem, row=row, field=field)
        self.kind = kind


class BadRows:
    """The unusable rows of one data set. Up to `limit` rows are skipped and counted."""

    def __init__(self, limit: int = 0, limit_name: str = "") -> None:
        """`limit_name`: the key or flag of the limit."""
        self.limit, self._limit_name = limit, limit_name
        self.errors: list[DatasetError] = []

    def add(self, error: DatasetError) -> None:
        """Count the row. Raises `error` without a limit, and UnusableInput above the limit."""
        if not self.limit:
            raise error
        self.errors.append(error)
        if len(self.errors) > self.limit:
            limit = f"{self._limit_name} = {self.limit:,}"
            raise UnusableInput(f"{error} (more unusable rows than {limit}; the first: {self.errors[0]})")


class DatasetRow(NamedTuple):
    path: Path  # the file, or the part of a folder
    number: int  # row number from 1; in JSONL, the line number
    fields: RowFields


def read_rows(path: Path, columns: Collection[str] = (), bad_rows: BadRows | None = None) -> Iterator[DatasetRow]:
    """Yield all rows of a file or of a folder's parts, without blank lines.

    From a parquet file, only `columns` are read, or all if none are given. Raises DatasetError, also for an empty file.
    """
    is_empty, bad_rows = True, bad_rows or BadRows()
    for file in list_data_files(path):
        for row in _read_file(file, columns, bad_rows):
            is_empty = False
            yield row
    if is_empty:
        raise bad_rows.errors[0] if bad_rows.errors else DatasetError(path, "no rows")


def list_data_files(path: Path) -> list[Path]:
    """Return the file, or the parts of a folder in the order of their names. Raises DatasetError."""
    try:
        if path.is_dir():
            return _list_parts(path)
        if not path.exists():
            raise DatasetError(path, "no such file" + ("" if _find_extension(path) else _explain_download(path)))
    except OSError as error:
        raise DatasetError(path, f"cannot be read: {error.strerror}") from None
    if _find_extension(path) is None:
        known = ", ".join((*_TEXT_READERS, ".parquet"))
        raise DatasetError(path, f"unknown file extension; use one of {known}, the text files also with .gz")
    return [path]


def _explain_download(path: Path) -> str:
    """Suggest a download. A path whose last two parts do not exist can be a data set's name on a hub."""
    may_be_name = len(path.parts) > 1 and path.parents[1].is_dir() and not path.parent.exists()
    name = "/".join(path.parts[-2:]) if may_be_name else "OWNER/NAME"
    return f" or folder; download a data set first: `asterism data fetch {name} --output FOLDER`"


def _list_parts(folder: Path) -> list[Path]:
    names = sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
    by_kind = {kind: [name for name in names if name.endswith(kind)] for kind in _PART_EXTENSIONS}
    kinds = [kind for kind, parts in by_kind.items() if parts]
    if len(kinds) != 1:
        problem = f"parts of several kinds ({', '.join(kinds)})" if kinds else "a folder without parts"
        raise DatasetError(folder, f"{problem}; expected files of one kind: {', '.join(_PART_EXTENSIONS)}")
    names = by_kind[kinds[0]]
    numbered = [match for name in names if (match := _NUMBERED_PART.match(name))]
    splits = {_find_data_set(name) for name in names} - {""}
    removed = {name for name in names if name.endswith(_REMOVED_ROWS)}
    if len(splits) > 1 or removed:
        found = ", ".join(sorted(splits | removed))
        raise DatasetError(folder, f"several data sets: {found}; set one file, or a separate folder for each data set")
    if numbered and len(numbered) != int(numbered[0][2]):
        raise DatasetError(folder, f"incomplete: {len(numbered)} of {int(numbered[0][2])} parts")
    return [folder / name for name in names]


def _find_data_set(name: str) -> str:
    """Return the name of a part's data set, or an empty text if the part's name contains none."""
    match = _NUMBERED_PART.match(name) or _SPLIT.search(name)
    return match[1] if match else ""


def _find_extension(path: Path) -> str | None:
    """Return `.parquet`, or the extension of a text file without `.gz`."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        return ".parquet"
    return next((each for each in _TEXT_READERS if name.removesuffix(".gz").endswith(each)), None)


def detect_encoding(path: Path) -> str:
    """Return "UTF-8", "UTF-16-LE with a byte order mark" or the like; empty for parquet. Raises DatasetError."""
    if _find_extension(path) == ".parquet":
        return ""
    try:
        with _open_text_file(path) as file:
            before = file.tell()
            encoding = _skip_byte_order_mark(path, file)
            mark = " with a byte order mark" if file.tell() > before else ""
    except (EOFError, zlib.error, OSError) as error:
        raise DatasetError(path, f"cannot be read: {error}") from None
    return f"{encoding.upper()}{mark}"


# ---------------------------------------------------------------- one file


def _read_file(path: Path, columns: Collection[str], bad_rows: BadRows) -> Iterator[DatasetRow]:
    read_text = _TEXT_READERS.get(_find_extension(path) or "")
    check_file(path)
    try:
        if read_text is None:
            yield from _read_parquet(path, columns)
            return
        with _open_text_file(path) as file:
            yield from read_text(path, file, _skip_byte_order_mark(path, file), bad_rows)
    except UnicodeDecodeError as error:
        raise DatasetError(path, f"not {error.encoding.upper()} text: {error.reason}; save it as UTF-8") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DatasetError(path, f"not a gzip file, or incomplete: {error}") from None
    except OSError as error:
        raise DatasetError(path, f"cannot be read: {error.strerror}") from None


def _open_text_file(path: Path) -> io.BufferedReader:
    return cast(io.BufferedReader, gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb"))


def _skip_byte_order_mark(path: Path, file: io.BufferedReader) -> str:
    """Skip the mark and return the encoding."""
    start = file.peek(4)[:4]
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if start.startswith(mark):
            file.read(len(mark))
            return encoding
    if b"\0" in start:
        raise DatasetError(path, "not UTF-8 text: UTF-16 or UTF-32 needs a byte order mark; save it as UTF-8")
    return "utf-8"


def _read_jsonl(path: Path, file: io.BufferedReader, encoding: str, bad_rows: BadRows) -> Iterator[DatasetRow]:
    with io.TextIOWrapper(file, encoding) as text:
        lines = file if encoding == "utf-8" else text  # text is decoded in blocks: its errors have no line number
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    row = _parse_row(path, number, _parse_json(path, line, number))
                except DatasetError as error:
                    bad_rows.add(error)
                else:
                    yield row


def _read_json(path: Path, file: io.BufferedReader, encoding: str, bad_rows: BadRows) -> Iterator[DatasetRow]:
    rows = _parse_json(path, file.read().decode(encoding))
    if not isinstance(rows, list):
        raise DatasetError(path, "not a JSON array of objects")
    for number, fields in enumerate(cast(list[object], rows), start=1):
        try:
            row = _parse_row(path, number, fields)
        except DatasetError as error:
            bad_rows.add(error)
        else:
            yield row


def _parse_json(path: Path, text: str | bytes, row: int | None = None) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        if (value := _parse_with_constants(text)) is not None:
            return value
        hint = "" if row else "; if each line is an object, rename the file to .jsonl"
        raise DatasetError(path, f"not JSON: {error}{hint}", row=row) from None
    except UnicodeDecodeError as error:
        raise DatasetError(path, f"not UTF-8 text: {error.reason}; save it as UTF-8", row=row) from None


def _parse_with_constants(text: str | bytes) -> object:
    """Parse JSON of Python or pandas with NaN and Infinity, which become null. Return None for other texts."""
    words = ("NaN", "Infinity") if isinstance(text, str) else (b"NaN", b"Infinity")
    if not any(word in text for word in words):  # pyright: ignore[reportOperatorIssue] - both are texts or bytes
        return None
    try:
        return json.loads(text, parse_constant=_read_as_null)
    except (ValueError, RecursionError):
        return None


def _read_as_null(_constant: str) -> None:
    """Return None. json.loads calls this function for NaN and Infinity."""


def _parse_row(path: Path, number: int, row: object) -> DatasetRow:
    if not isinstance(row, dict):
        raise DatasetError(path, "not a JSON object", row=number)
    return DatasetRow(path, number, cast(RowFields, row))


def _read_csv(path: Path, file: io.BufferedReader, encoding: str, bad_rows: BadRows) -> Iterator[DatasetRow]:
    """Yield rows. All values are texts; an empty value is null."""
    number = 0
    csv.field_size_limit(_MAX_CSV_CHARACTERS)
    with io.TextIOWrapper(file, encoding, newline="") as text:
        try:
            lines = filter(None, csv.reader(text, strict=True))
            names = next(lines, [])
            if len(set(names)) != len(names):
                raise DatasetError(path, f"columns of the same name: {', '.join(names)}")
            for number, values in enumerate(lines, start=1):
                if len(values) != len(names):
                    bad_rows.add(DatasetError(path, f"{len(values)} values for {len(names)} columns", row=number))
                    continue
                yield DatasetRow(path, number, {name: value or None for name, value in zip(names, values, strict=True)})
        except csv.Error as error:
            raise DatasetError(path, f"not CSV: {error}", row=number + 1) from None


def _read_parquet(path: Path, columns: Collection[str]) -> Iterator[DatasetRow]:
    import polars  # a slow import that most runs do not need

    try:
        frame = polars.scan_parquet(path, glob=False)
        if known := [name for name in frame.collect_schema() if name in columns]:
            frame = frame.select(known)
        # The shortest text of a 32-bit float is the number in the data: 0.1, not 0.10000000149.
        short_floats = polars.col(polars.Float32).cast(polars.String).cast(polars.Float64)
        frame = frame.with_columns(short_floats, polars.selectors.decimal().cast(polars.String))
        for start in itertools.count(0, _BLOCK_ROWS):
            block = frame.slice(start, _BLOCK_ROWS).collect()
            for number, fields in enumerate(block.iter_rows(named=True), start=start + 1):
                yield DatasetRow(path, number, fields)
            if block.height < _BLOCK_ROWS:
                return
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException) as error:
        raise DatasetError(path, f"not a parquet file: {error}") from error


_TEXT_READERS: dict[str, Callable[[Path, io.BufferedReader, str, BadRows], Iterator[DatasetRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
}
