"""Rows of cold-start files, and a tokenizer with one id per character for their dialogues."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asterism.configs.schema.algorithm import SftFileConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.engine.data.data_files import BadRows
from asterism.engine.data.sft_dialogues import PLAIN_FILE, TokenizedDialogue, iter_sft_dialogues
from asterism.policies.dialogue.chat_format import DialogueFormat, TextSegment, build_dialogue_format, encode_segments
from asterism.tasks.math_python import MATH_PYTHON

FORMAT = build_dialogue_format(DialogueConfig(tools=("jupyter_code",)), MATH_PYTHON)  # the format of the run
QUESTION = {"role": "user", "content": "1?"}
RESULT = {"role": "tool", "content": "1"}
ANSWER = {"role": "assistant", "content": "<reason>Yes.</reason>\n<answer>\\boxed{1}</answer>"}


class LetterTokenizer:
    """A tokenizer with one id per character. A character of untrusted text has a different id."""

    def encode(self, text: str, *, trusted: bool) -> list[int]:
        return [2 * ord(letter) + trusted for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token // 2) for token in token_ids)


class ReadRow(NamedTuple):
    dialogue: TokenizedDialogue

    @property
    def text(self) -> str:
        return LetterTokenizer().decode(self.dialogue.token_ids)

    @property
    def generated(self) -> str:
        """Return the text that has a loss."""
        pairs = zip(self.dialogue.token_ids, self.dialogue.loss_mask, strict=True)
        return LetterTokenizer().decode([token for token, in_loss in pairs if in_loss])


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_file(
    path: Path,
    file: SftFileConfig = PLAIN_FILE,
    formats: DialogueFormat | Mapping[str, DialogueFormat] = FORMAT,
    bad_rows: BadRows | None = None,
) -> list[ReadRow]:
    """Read a file. `formats`: the formats by task, or one format for a run without tasks."""
    by_task = {"": formats} if isinstance(formats, DialogueFormat) else formats
    return [ReadRow(each) for each in iter_sft_dialogues(path, LetterTokenizer(), by_task, file, bad_rows)]


def read_rows(path: Path, *rows: Any, **options: Any) -> list[ReadRow]:
    """Write rows and read them. `options`: the arguments of read_file."""
    return read_file(write_rows(path, *rows), **options)


def read_row(path: Path, *messages: Any, **options: Any) -> ReadRow:
    """Write and read one row with these messages."""
    (row,) = read_rows(path, {"messages": messages}, **options)
    return row


def encode(*segments: TextSegment) -> list[int]:
    return encode_segments(LetterTokenizer(), segments)
