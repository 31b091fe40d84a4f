"""Tests of files and folders of rows: formats, encodings, compression, parts, and errors."""

import csv
import gzip
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars
import pytest

from asterism.engine.data.data_files import DatasetError, read_rows

ROWS = [{"question": "1,\n\u2028 + \u00e4?", "answer": "2"}, {"question": 'say "b"', "answer": None}]


def write_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> bytes:
    content = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows).encode()
    path.write_bytes(content)
    return content


def write_csv(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)


WRITERS: dict[str, Callable[[Path], object]] = {
    ".jsonl": write_jsonl,
    ".json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    ".csv": write_csv,
    ".parquet": lambda path: polars.DataFrame(ROWS).write_parquet(path),
}


def read_fields(path: Path) -> list[dict[str, Any]]:
    return [row.fields for row in read_rows(path)]


def read_error(path: Path) -> str:
    with pytest.raises(DatasetError) as caught:
        list(read_rows(path))
    return str(caught.value).replace(f"{path.parent}/", "")


@pytest.mark.parametrize("extension", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path: Path, extension: str) -> None:
    WRITERS[extension](tmp_path / f"a{extension}")
    rows = list(read_rows(tmp_path / f"a{extension}", ["question", "answer"]))
    assert [row.fields for row in rows] == ROWS
    assert [(row.path.name, row.number) for row in rows] == [(f"a{extension}", 1), (f"a{extension}", 2)]


@pytest.mark.parametrize("extension", [".jsonl", ".json", ".csv"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_text_file_can_be_compressed_and_start_with_a_byte_order_mark(
    tmp_path: Path, extension: str, encoding: str
) -> None:
    WRITERS[extension](tmp_path / f"a{extension}")
    content = (tmp_path / f"a{extension}").read_bytes().decode().encode(encoding)
    (tmp_path / f"b{extension}").write_bytes(content)
    (tmp_path / f"c{extension}.gz").write_bytes(gzip.compress(content))
    assert read_fields(tmp_path / f"b{extension}") == read_fields(tmp_path / f"c{extension}.gz") == ROWS


@pytest.mark.parametrize("extension", [".jsonl", ".json", ".csv"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "latin-1"])
def test_the_error_for_another_encoding_names_the_encoding(tmp_path: Path, extension: str, encoding: str) -> None:
    WRITERS[extension](tmp_path / f"a{extension}")
    content = (
        (tmp_path / f"a{extension}").read_bytes().decode().replace("\u2028", "\u00e4").replace("\\u00e4", "\u00e4")
    )
    (tmp_path / f"a{extension}").write_bytes(content.encode(encoding))
    error = read_error(tmp_path / f"a{extension}")
    assert "not UTF-8 text: " in error
    assert error.endswith("; save it as UTF-8")


def test_invalid_text_after_the_byte_order_mark_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe{\x00}")
    assert read_error(tmp_path / "a.jsonl") == "a.jsonl: not UTF-16-LE text: truncated data; save it as UTF-8"


def test_the_parts_of_a_folder_are_read_in_alphabetical_order(tmp_path: Path) -> None:
    for number, row in enumerate(ROWS):
        polars.DataFrame([row]).write_parquet(tmp_path / f"train-0000{number}-of-00002.parquet")
    (tmp_path / "README.md").write_text("of the data set")
    rows = list(read_rows(tmp_path))
    assert [row.fields for row in rows] == ROWS
    assert [(row.path.name, row.number) for row in rows] == [
        ("train-00000-of-00002.parquet", 1),
        ("train-00001-of-00002.parquet", 1),
    ]


def test_the_name_of_a_parquet_file_is_no_glob_pattern(tmp_path: Path) -> None:
    for name, answer in (("some[1].parquet", 1), ("some1.parquet", 2)):
        polars.DataFrame({"answer": [answer]}).write_parquet(tmp_path / name)
    assert read_fields(tmp_path / "some[1].parquet") == [{"answer": 1}]


def test_numbers_in_parquet_keep_their_decimals(tmp_path: Path) -> None:
    columns = {
        "short": polars.Series([0.1], dtype=polars.Float32),
        "long": polars.Series([0.1]),
        "decimal": polars.Series([Decimal("12.50")]),
    }
    polars.DataFrame(columns).write_parquet(tmp_path / "a.parquet")
    assert read_fields(tmp_path / "a.parquet") == [{"short": 0.1, "long": 0.1, "decimal": "12.50"}]


def test_csv_can_contain_a_long_value(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"question\n{'x' * 200_000}\n")
    assert read_fields(tmp_path / "a.csv") == [{"question": "x" * 200_000}]


@pytest.mark.parametrize("extension", [".jsonl", ".jsonl.gz"])
def test_a_folder_can_contain_jsonl_parts(tmp_path: Path, extension: str) -> None:
    content = write_jsonl(tmp_path / "rows")
    for name in ("b", "a"):
        (tmp_path / f"{name}{extension}").write_bytes(gzip.compress(content) if ".gz" in extension else content)
    assert read_fields(tmp_path) == [*ROWS, *ROWS]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([], "a folder without parts; expected files of one kind: .parquet, .jsonl, .jsonl.gz"),
        (["README.md", ".hidden.jsonl"], "a folder without parts; expected"),
        (["a.jsonl", "a.parquet"], "parts of several kinds (.parquet, .jsonl); expected"),
        (["train-00000-of-00001.parquet", "test-00000-of-00001.parquet"], "several data sets: test, train; set one"),
        (["train-00000-of-00002.parquet"], "incomplete: 1 of 2 parts"),
        (["train-00000-of-00002-8a2f3c.jsonl"], "incomplete: 1 of 2 parts"),
        (["train-00000-of-00001-8a2f3c.jsonl", "test-00000-of-00001-9b2f3c.jsonl"], "several data sets: test, train;"),
        (["train.jsonl", "test.jsonl"], "several data sets: test, train; set one"),
        (["train-00000-of-00001.parquet", "test.parquet"], "several data sets: test, train; set one"),
        (["sums_train.jsonl", "sums_test.jsonl"], "several data sets: test, train; set one"),
        (["clean.jsonl", "clean.removed.jsonl"], "several data sets: clean.removed.jsonl; set one"),
    ],
)
def test_an_unusable_folder_is_refused(tmp_path: Path, names: list[str], problem: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    assert read_error(folder).startswith(f"folder: {problem}")


def test_the_error_for_a_data_set_of_a_hub_shows_the_download_command(tmp_path: Path) -> None:
    error = read_error(tmp_path / "open-r1" / "DAPO-Math-17k-Processed")
    assert "no such file or folder; download a data set first: `asterism data fetch " in error
    assert "fetch open-r1/DAPO-Math-17k-Processed --output " in error
    assert "fetch OWNER/NAME --output " in read_error(tmp_path / "data" / "cold_start" / "parts")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    assert read_error(tmp_path / "some.jsonl") == "some.jsonl: no such file"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b"", "no rows"),
        ("a.jsonl", b"\n \n", "no rows"),
        ("a.json", b"[]", "no rows"),
        ("a.csv", b"question,answer\n", "no rows"),
        ("a.csv", b"", "no rows"),
        ("a.jsonl", b'["question", "answer"]\n', "row 1: not a JSON object"),
        ("a.jsonl", b'{}\n{"question": "cut of', "row 2: not JSON: "),
        ("a.jsonl", b"{}\n\xff\xfe\n", "row 2: not JSON: "),
        ("a.jsonl", b'{}\n{"question": "\xff"}\n', "row 2: not UTF-8 text: invalid start byte; save it as UTF-8"),
        ("a.jsonl", b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}\n", "row 1: not JSON: "),
        ("a.json", b"{}\n{}\n", "not JSON: "),
        ("a.json", b'{"rows": []}', "not a JSON array of objects"),
        ("a.json", b"[1]", "row 1: not a JSON object"),
        ("a.csv", b"a,b\n1,2\n1\n", "row 2: 1 values for 2 columns"),
        ("a.csv", b'a,b\n1,"2\n', "row 1: not CSV: unexpected end of data"),
        ("a.csv", b"a,a\n1,2\n", "columns of the same name: a, a"),
        ("a.jsonl.gz", b"{}", "not a gzip file, or incomplete: "),
        ("a.jsonl.gz", gzip.compress(b"{}\n" * 99, mtime=0)[:-4], "not a gzip file, or incomplete: "),
        ("a.parquet", b"PAR1 and no more", "not a parquet file: "),
        ("a.txt", b"{}", "unknown file extension; use one of .jsonl, .json, .csv, .parquet, "),
        ("a.parquet.gz", b"{}", "unknown file extension; use one of "),
    ],
)
def test_an_unreadable_file_is_refused(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert read_error(tmp_path / name).startswith(f"{name}: {problem}")
