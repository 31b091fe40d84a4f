"""Tests: every unusable row has the error in messages.txt, which tests/golden_messages.py rewrites."""

import json
from pathlib import Path
from typing import Any

from asterism.engine.data.data_files import DatasetError, DatasetRow
from asterism.engine.data.datasets import read_problems
from asterism.engine.data.dialogue_messages import parse_dialogue
from tests.engine.data.cold_start_rows import read_row
from tests.golden_messages import check_golden_messages


def test_the_error_for_an_unusable_row_names_the_field(tmp_path: Path) -> None:
    """An input is the kind of a row, and the row: a problem, or a dialogue's messages."""
    file = tmp_path / "some.jsonl"

    def read_problem(row: Any) -> None:
        file.write_text('{"question": "a", "answer": "1"}\n' + json.dumps(row))
        list(read_problems(file))

    def read_messages(messages: Any) -> None:
        read_row(file, *messages)

    def read_conversations(turns: Any) -> None:
        parse_dialogue(DatasetRow(file, 3, {"conversations": turns}))

    def read(case: str) -> None:
        kind, _, row = case.partition(": ")
        readers = {"problem": read_problem, "messages": read_messages, "conversations": read_conversations}
        readers[kind](json.loads(row, strict=False))

    check_golden_messages(Path(__file__).parent / "messages.txt", read, {f"{tmp_path}/": ""}, DatasetError)
