"""Counters of a run that outlive its launches, each a file with a number: how often it was launched, how many nodes joined."""

from __future__ import annotations

import os
from pathlib import Path

from configs.errors import UnusableInput


def count_one_more(path: Path) -> int:
    """From 1. Whoever reads the file, after a power failure too, sees the whole number or the whole one before.

    Raises UnusableInput where the file holds no number, and OSError.
    """
    number = _read(path) + 1
    new = path.with_name(f"{path.name}.new")
    with new.open("w") as file:
        file.write(f"{number}\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return number


def _read(path: Path) -> int:
    if not path.exists():
        return 0
    text = path.read_bytes().strip()
    if not text.isdigit():
        raise UnusableInput(
            f"{path}: this is no count: {text[:40]!r}; write into it one that is higher than it ever was"
        )
    return int(text)
