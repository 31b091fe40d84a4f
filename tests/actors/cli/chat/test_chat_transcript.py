"""A transcript has one row per conversation; the row grows with the conversation."""

import json
from pathlib import Path

import pytest

from asterism.actors.cli.chat.chat_transcript import TranscriptFile, build_row
from asterism.configs.errors import UnusableInput
from tests.bus.process.test_structured_log import limiting_file_size

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "<reason>b"}


def test_a_row_ends_with_the_assistant_and_names_its_task() -> None:
    assert build_row([], "system", "") is None
    assert build_row([USER], "system", "") is None
    assert build_row([USER, ASSISTANT, USER], "", "math") == {"messages": [USER, ASSISTANT], "task": "math"}
    first = {"role": "system", "content": "Be brief."}
    assert build_row([USER, ASSISTANT], "Be brief.", "") == {"messages": [first, USER, ASSISTANT]}


@pytest.mark.parametrize("ending", ["", "\n"])
def test_new_rows_are_appended_to_the_file_and_grow(ending: str, tmp_path: Path) -> None:
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


def test_two_chats_do_not_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = TranscriptFile(path, "--transcript")
    file.save({"messages": ["row"]})
    with pytest.raises(UnusableInput, match=f"/save {path}: another chat writes this file; name another one"):
        TranscriptFile(path, "/save")
    file.close()
    TranscriptFile(path, "/save").close()


def test_a_row_that_does_not_fit_on_the_disk_does_not_replace_the_former_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = TranscriptFile(path, "--transcript")
    file.save({"messages": ["row"]})
    with limiting_file_size(100), pytest.raises(UnusableInput, match="File too large"):
        file.save({"messages": ["row" * 1000]})
    file.close()
    assert json.loads(path.read_text()) == {"messages": ["row"]}


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=f"--transcript {tmp_path}: Is a directory"):
        TranscriptFile(tmp_path, "--transcript")
