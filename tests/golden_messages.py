"""Compares error messages with text files of lines `INPUT => MESSAGE`, in which a person reads them together.

`UPDATE_GOLDEN=1 pytest ...` rewrites the messages and keeps inputs and comments; read the diff before you commit it.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from asterism.configs.errors import UnusableInput

_ARROW = " => "


def check_golden_messages(path: Path, run: Callable[[str], object], masks: dict[str, str]) -> None:
    """Run the input of each line and compare the error with the line's message. `masks`: texts that vary -> their names.

    Newlines are written as `\\n` on both sides. Lines that begin with `#` are comments.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [line if line.startswith("#") or not line else _describe(line, run, masks) for line in lines]
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
    else:
        assert found == lines


def _describe(line: str, run: Callable[[str], object], masks: dict[str, str]) -> str:
    case = line.partition(_ARROW)[0]
    return f"{case}{_ARROW}{read_error(lambda: run(case.replace(chr(92) + 'n', chr(10))), masks)}"


def read_error(run: Callable[[], object], masks: dict[str, str]) -> str:
    """Return the message in one line, without the texts that vary."""
    with pytest.raises(UnusableInput) as caught:
        run()
    message = str(caught.value)
    for text, name in {**masks, str(Path.cwd()): "THE_CURRENT_FOLDER"}.items():
        message = message.replace(text, name)
    return message.replace("\n", "\\n")
