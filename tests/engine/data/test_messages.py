"""Every unusable row has the message in messages.txt; tests/golden_messages.py rewrites that file."""

import json
from pathlib import Path
from typing import Any

from asterism.engine.data.data_files import DatasetError, DatasetRow
from asterism.engine.data.datasets import read_problems
from asterism.engine.data.dialogue_messages import parse_dialogue
from tests.engine.data.cold_start_rows import read_row
from tests.golden_messages import check_golden_messages


def test_each_unusable_row_is_refused_with_its_field(tmp_path: Path) -> None:
    """An input is a kind of row, and the row: a problem, or the messages of a dialogue."""
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
