"""Compares error messages with text files of lines `INPUT => MESSAGE`, in which a person can review all messages.

`UPDATE_GOLDEN=1 pytest ...` rewrites the messages and keeps inputs and comments; read the diff before you commit it.
"""

import os
from collections.abc import Callable
from pathlib import Path

from asterism.configs.errors import UnusableInput

_ARROW = " => "


def check_golden_messages(
    path: Path, run: Callable[[str], object], masks: dict[str, str], error: type[UnusableInput] = UnusableInput
) -> None:
    """Run the input of each line and compare its error with the line's message.

    Newlines are written as `\\n` on both sides. Lines that begin with `#` are comments. `masks` has the names of the texts
    that vary. Raises AssertionError if an input causes no error, even while the file is rewritten.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    masks = {**masks, str(Path.cwd()): "THE_CURRENT_FOLDER"}
    found: list[str] = []
    for line in lines:
        case = line.partition(_ARROW)[0]
        is_case = line and not line.startswith("#")
        found.append(f"{case}{_ARROW}{_read_error(case, run, masks, error)}" if is_case else line)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
    else:
        assert found == lines


def _read_error(case: str, run: Callable[[str], object], masks: dict[str, str], error: type[UnusableInput]) -> str:
    try:
        run(case.replace(r"\n", "\n"))
    except error as caught:
        message = str(caught)
    else:
        raise AssertionError(f"this input is accepted: {case}")
    for text, name in masks.items():
        message = message.replace(text, name)
    return message.replace("\n", r"\n")
