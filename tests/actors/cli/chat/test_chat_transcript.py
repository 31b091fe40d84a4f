"""Transcripts: a row for each conversation, which grows with it."""

import json
from pathlib import Path

import pytest

from actors.cli.chat.chat_transcript import TranscriptFile, build_row
from configs.errors import UnusableInput

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "<reason>b"}


def test_a_row_ends_with_the_assistant_and_names_its_task() -> None:
    assert build_row([], "system", "") is None
    assert build_row([USER], "system", "") is None
    assert build_row([USER, ASSISTANT, USER], "", "math") == {"messages": [USER, ASSISTANT], "task": "math"}
    first = {"role": "system", "content": "Be brief."}
    assert build_row([USER, ASSISTANT], "Be brief.", "") == {"messages": [first, USER, ASSISTANT]}


@pytest.mark.parametrize("ending", ["", "\n"])
def test_rows_follow_the_rows_of_the_file_and_grow(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"kept": 1}' + ending)
    file = TranscriptFile(path, "--transcript")
    file.save({"messages": ["a much longer row"]})
    file.save({"messages": ["row"]})
    file.end_conversation()
    file.save(None)
    file.save({"messages": ["next"]})
    file.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"kept": 1},
        {"messages": ["row"]},
        {"messages": ["next"]},
    ]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=f"--transcript {tmp_path}: Is a directory"):
        TranscriptFile(tmp_path, "--transcript")
