"""Writing to a disk that may be full: whoever cannot write says which file it was."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from configs.errors import UnusableInput

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)


class DiskRefused(UnusableInput):
    """A file that cannot be written: the disk is full, over its quota, read-only, or broken."""

    def __init__(self, path: Path | str, number: int) -> None:
        super().__init__(f"{path}: {os.strerror(number)}")


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Raises DiskRefused for what a disk says; it names the file that the system does, or else `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        raise DiskRefused(error.filename or path, error.errno) from error


def write_whole(path: Path, content: bytes) -> None:
    """Who reads it sees the whole of it, or the whole of what was there before. Raises DiskRefused."""
    new = path.with_name(f"{path.name}.new")
    try:
        with writing(new):
            new.write_bytes(content)
            new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
