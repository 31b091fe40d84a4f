"""Inspection, splits and rendering of data files."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import polars
import pytest

from asterism.configs.errors import UnusableInput
from asterism.tasks.curation.inspection import inspect_data
from asterism.tasks.curation.splitting import split_questions
from tests.engine.data.cold_start_rows import write_rows


def refuse_xs(answers: Collection[str]) -> list[str]:
    return [answer for answer in answers if "x" in answer]


def test_an_inspection_counts_columns_answers_and_unusable_rows(tmp_path: Path) -> None:
    rows = [
        {"question": "One and one?", "answer": 2, "level": None},
        {"question": "One and one?", "answer": 2.0},
        {"question": "Half?", "answer": "1/2", "level": 1},
        {"question": "Which?", "answer": "x+1"},
        {"question": "", "answer": 3},
        [],
    ]
    found = inspect_data(write_rows(tmp_path / "rows.jsonl", *rows), refuse_xs)
    assert (found.num_rows, found.num_unusable) == (6, 2)
    assert found.columns["answer"].types == {"int": 2, "float": 1, "str": 2}
    assert found.columns["level"].num_missing == 5
    assert found.answer_kinds == {"integer": 2, "number": 1, "expression": 1}
    assert found.question_characters == [6, 12, 12]
    assert found.unreadable_answers == ["x+1"]
    assert "1 rows that repeat a question" in found.counts
    assert ["row 5, field `question`" in found.unusable[0], "row 6" in found.unusable[1]] == [True, True]


def test_rows_with_a_question_and_a_dialogue_are_inspected_as_both(tmp_path: Path) -> None:
    """These rows have the columns of NuminaMath-CoT: `problem`, `solution` and `messages`."""
    user, assistant = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
    rows = [
        {"problem": "1 + 1?", "solution": "It is \\boxed{2}", "messages": [user, assistant]},
        {"problem": "1 + 1?", "solution": "It is 2", "messages": [user, assistant]},
        {"messages": [user, user, assistant]},
    ]
    found = inspect_data(write_rows(tmp_path / "rows.jsonl", *rows), refuse_xs)
    assert (found.num_rows, found.num_dialogues, found.num_unusable) == (3, 3, 2)
    assert found.answer_kinds == {"integer": 1}
    assert ["row 2, field `solution`" in found.unusable[0], "row 3" in found.unusable[1]] == [True, True]


@pytest.mark.parametrize(
    ("encoding", "described"),
    [("utf-8", "UTF-8"), ("utf-8-sig", "UTF-8 with a byte order mark"), ("utf-16", "UTF-16-LE with a byte order mark")],
)
def test_the_encoding_is_reported(tmp_path: Path, encoding: str, described: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "Größe?", "answer": 1}, ensure_ascii=False) + "\n", encoding=encoding)
    found = inspect_data(path, refuse_xs)
    assert found.encodings == {"rows.jsonl": described}
    assert found.num_rows == 1


def test_dialogues_and_parts_of_parquet_are_recognized(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]
    for number in range(2):
        polars.DataFrame({"messages": [messages]}).write_parquet(tmp_path / f"part-{number}.parquet")
    found = inspect_data(tmp_path, refuse_xs)
    assert (found.num_rows, found.num_dialogues, found.num_unusable) == (2, 2, 0)
    assert found.encodings == {"part-0.parquet": "", "part-1.parquet": ""}
    shared = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hi"}]}
    joined = {"input": messages[:1], "output": "Hi", "reasoning": "off"}
    found = inspect_data(write_rows(tmp_path / "rows.jsonl", shared, joined), refuse_xs)
    assert (found.num_rows, found.num_dialogues, found.num_unusable) == (2, 2, 0)
    found = inspect_data(write_rows(tmp_path / "rows.jsonl", {"messages": messages[:1], "answer": 1}), refuse_xs)
    assert (found.num_rows, found.num_dialogues, found.answer_kinds) == (1, 0, {"integer": 1})


def make_questions(count: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {number} and 1?", "answer": number + 1, "id": number} for number in range(count)]


def split(source: Path, num_test: int, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    train, test = source.with_name("train.jsonl"), source.with_name("test.jsonl")
    report = split_questions(source, train, test, num_test, seed)
    parts = [[json.loads(line) for line in path.read_text().splitlines()] for path in (train, test)]
    assert [len(part) for part in parts] == [report.num_train, report.num_test]
    return parts[0], parts[1]


def test_all_copies_of_a_question_are_in_the_same_part(tmp_path: Path) -> None:
    rows = make_questions(100)
    copies = [row | {"question": row["question"].upper(), "id": -1} for row in rows]
    train, test = split(write_rows(tmp_path / "rows.jsonl", *rows, *copies), 30)
    assert (len(train), len(test)) == (140, 60)
    assert not {row["question"].upper() for row in train} & {row["question"].upper() for row in test}


def test_the_split_depends_on_the_seed_and_not_on_the_order_of_rows(tmp_path: Path) -> None:
    rows = make_questions(50)
    first = {row["id"] for row in split(write_rows(tmp_path / "a.jsonl", *rows), 20)[1]}
    again = {row["id"] for row in split(write_rows(tmp_path / "b.jsonl", *rows[::-1]), 20)[1]}
    other = {row["id"] for row in split(write_rows(tmp_path / "c.jsonl", *rows), 20, seed=1)[1]}
    assert first == again != other


def test_a_test_set_that_leaves_no_training_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"--test 5: .* has only 5 distinct questions"):
        split(write_rows(tmp_path / "rows.jsonl", *make_questions(5)), 5)
