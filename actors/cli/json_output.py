"""`--json FILE`: writes the complete result of a command for other programs."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from configs.errors import UnusableInput


def check_json_path(file: Path | None) -> None:
    """Raises UnusableInput before the work starts if the file could not be written."""
    if file is None:
        return
    if file.is_dir():
        raise UnusableInput(f"--json {file}: is a folder; name a file")
    if not file.parent.is_dir():
        raise UnusableInput(f"--json {file}: the folder {file.parent} does not exist")


def write_json(file: Path | None, result: msgspec.Struct | Sequence[msgspec.Struct]) -> None:
    """Raises UnusableInput."""
    if file is None:
        return
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    except OSError as error:
        raise UnusableInput(f"--json {file}: {error.strerror}") from error
