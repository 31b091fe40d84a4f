"""Questions with known answers: every layout of docs/data.md, and the errors for invalid files."""

import json
from pathlib import Path
from typing import Any

import polars
import pytest

from engine.data.datasets import DatasetError, read_problems


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some.jsonl"


def read_one(file: Path, row: dict[str, Any]) -> tuple[str, str]:
    (problem,) = read_problems(write_jsonl(file, row))
    return problem.question, problem.ground_truth


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param({"question": "Q?", "answer": "so\n<<1+1=2>>2\n#### 1,234"}, ("Q?", "1234"), id="gsm8k"),
        pytest.param({"id": 60, "problem": "Q?", "solution": "\\boxed{9}", "answer": "025"}, ("Q?", "25"), id="aime24"),
        pytest.param({"Problem": "Q?", "Answer": 73}, ("Q?", "73"), id="aime-capitalized"),
        pytest.param({"question": "Q?", "answer": 27.0}, ("Q?", "27"), id="amc23"),
        pytest.param({"question": "Q?", "answer": 0.5}, ("Q?", "0.5"), id="fraction"),
        pytest.param(
            {"problem": "Q?", "solution": "first \\boxed{0}, then \\boxed{\\frac{1}{2}} cm"},
            ("Q?", "\\frac{1}{2}"),
            id="minerva",
        ),
        pytest.param({"question": "Q?", "answer": "000"}, ("Q?", "0"), id="zeros"),
        pytest.param({"question": "Q?", "answer": "x^2 + 1"}, ("Q?", "x^2 + 1"), id="plain"),
        pytest.param(
            {"prompt": "Q?", "reward_model": {"ground_truth": "34", "style": "rule"}, "extra_info": {"index": "a"}},
            ("Q?", "34"),
            id="dapo",
        ),
        pytest.param(
            {
                "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q?"}],
                "reward_model": {"ground_truth": "34"},
            },
            ("Q?", "34"),
            id="chat-messages",
        ),
        pytest.param(
            {
                "prompt": [{"role": "user", "content": "Solve this: Q?"}],
                "reward_model": {"ground_truth": "34"},
                "extra_info": {"question": "Q?", "answer": "34", "split": "train"},
            },
            ("Q?", "34"),
            id="chat-messages-with-bare-question",
        ),
    ],
)
def test_each_layout_yields_the_question_and_answer(file: Path, row: dict[str, Any], expected: tuple[str, str]) -> None:
    assert read_one(file, row) == expected


def test_a_parquet_file_equals_the_same_rows_as_jsonl(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "one?"}], "reward_model": {"ground_truth": "1"}, "agent_name": "a"},
        {"prompt": [{"role": "user", "content": "two?"}], "reward_model": {"ground_truth": "2"}, "agent_name": "a"},
    ]
    parquet = tmp_path / "some.parquet"
    polars.DataFrame(rows).write_parquet(parquet)
    lines = read_problems(write_jsonl(tmp_path / "some.jsonl", *rows))
    assert [problem[1:] for problem in read_problems(parquet)] == [problem[1:] for problem in lines]


def test_a_problem_is_named_after_its_file_and_row(file: Path) -> None:
    write_jsonl(file, {"question": "a", "answer": "1"}, {"question": "b", "answer": "2"})
    assert [problem.name for problem in read_problems(file)] == ["some.jsonl:1", "some.jsonl:2"]


def test_a_null_field_counts_as_absent(file: Path) -> None:
    assert read_one(file, {"question": None, "problem": "Q?", "answer": None, "solution": "\\boxed{3}"}) == ("Q?", "3")


def test_blank_lines_are_skipped_but_counted(file: Path) -> None:
    file.write_text('\n{"question": "a", "answer": "1"}\n\n')
    assert [problem.name for problem in read_problems(file)] == ["some.jsonl:2"]


def read_error(file: Path) -> str:
    with pytest.raises(DatasetError) as caught:
        read_problems(file)
    return str(caught.value).replace(f"{file.parent}/", "")


def test_a_missing_file_is_reported(file: Path) -> None:
    assert read_error(file) == "some.jsonl: no such file"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("some.jsonl", "", "the file has no rows"),
        ("some.jsonl", "\n \n", "the file has no rows"),
        ("some.jsonl", '["question", "answer"]\n', "row 1: not a JSON object"),
        ("some.csv", "question,answer\n", "unknown file extension; use one of .jsonl, .parquet"),
        ("some.parquet", "PAR1 and no more", "not a parquet file: "),
    ],
)
def test_an_unreadable_file_is_refused(tmp_path: Path, name: str, content: str, problem: str) -> None:
    (tmp_path / name).write_text(content)
    assert read_error(tmp_path / name).startswith(f"{name}: {problem}")


@pytest.mark.parametrize("line", [b'{"question": "cut of', b"\xff\xfe", b'{"question": "\xff", "answer": "1"}'])
def test_a_line_of_invalid_json_is_reported_by_number(file: Path, line: bytes) -> None:
    file.write_bytes(b'{"question": "a", "answer": "1"}\n' + line + b"\n")
    assert read_error(file).startswith("some.jsonl: row 2: not JSON: ")


@pytest.mark.parametrize(
    ("row", "field", "problem"),
    [
        ({"answer": "1"}, "question", "no question; expected a non-empty string"),
        ({"problem": " ", "answer": "1"}, "problem", "no question; expected a non-empty string"),
        ({"question": 7, "answer": "1"}, "question", "no question; expected a non-empty string"),
        (
            {"prompt": [{"role": "system", "content": "S"}], "answer": "1"},
            "prompt",
            "no question; expected a non-empty string",
        ),
        ({"question": "Q?"}, "answer", "missing, or without an answer"),
        ({"question": "Q?", "answer": ""}, "answer", "missing, or without an answer"),
        ({"question": "Q?", "answer": "so it is 3\n####"}, "answer", "missing, or without an answer"),
        ({"question": "Q?", "answer": True}, "answer", "missing, or without an answer"),
        ({"question": "Q?", "solution": "it is 3"}, "solution", "missing, or without an answer"),
        ({"prompt": "Q?", "reward_model": {}}, "reward_model.ground_truth", "missing, or without an answer"),
    ],
)
def test_an_incomplete_row_is_named_with_its_field(file: Path, row: dict[str, Any], field: str, problem: str) -> None:
    write_jsonl(file, {"question": "a", "answer": "1"}, row)
    assert read_error(file) == f"some.jsonl: row 2, field `{field}`: {problem}"
