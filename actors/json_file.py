"""`--json FILE`: what a command found, all of it, for other programs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from configs.errors import UnusableInput


def check_place(file: Path | None) -> None:
    """Before the work begins. Raises UnusableInput where no file could be written."""
    if file is None:
        return
    if file.is_dir():
        raise UnusableInput(f"--json {file}: Is a directory")
    if not file.parent.is_dir():
        raise UnusableInput(f"--json {file}: there is no folder {file.parent}")


def write(file: Path | None, found: msgspec.Struct) -> None:
    """Raises UnusableInput."""
    if file is None:
        return
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    except OSError as error:
        raise UnusableInput(f"--json {file}: {error.strerror}") from error
