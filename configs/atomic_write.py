"""Writes files atomically and synchronized; errors name the file when a disk refuses a write."""

import contextlib
import errno
import fcntl
import gzip
import os
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import cast

from asterism.configs.errors import UnusableInput

DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)


class DiskError(UnusableInput):
    """A file cannot be written: the disk is full, over its quota, read-only, or broken."""

    def __init__(self, path: Path | str, error_number: int) -> None:
        super().__init__(f"{path}: {os.strerror(error_number)}")


@contextmanager
def raising_disk_errors(path: Path) -> Generator[None]:
    """Raise DiskError for disk errors. The message names the OSError's file, or `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRNOS:
            raise
        raise DiskError(error.filename or path, error.errno) from error


def check_writable(path: Path) -> None:
    """Check before long work that `replacing_file` can begin. Raises UnusableInput."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.touch()
        new.unlink()
    except OSError as error:
        raise UnusableInput(f"{path}: cannot be written: {error.strerror}") from None


def write_atomically(path: Path, content: bytes, *, is_private: bool = False) -> None:
    """Write a file, so that a reader gets the complete old or new content. A symbolic link is replaced, not followed.

    `is_private`: only the user can read the file, which can contain secrets. Raises DiskError.
    """
    with _replacing(path, is_private=is_private) as file:
        file.write(content)


@contextmanager
def replacing_file(path: Path) -> Generator[BufferedIOBase]:
    """Yield a file that gets its name only when complete; compressed if the name ends with .gz. Raises DiskError."""
    with _replacing(path) as file:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as compressed:  # equal rows give equal bytes
                yield cast(BufferedIOBase, compressed)
        else:
            yield file


@contextmanager
def _replacing(path: Path, *, is_private: bool = False) -> Generator[BufferedIOBase]:
    new, mode = path.with_name(f"{path.name}.new"), 0o600 if is_private else 0o666
    try:
        with raising_disk_errors(new):
            if is_private or new.is_symlink():
                new.unlink(missing_ok=True)  # an existing file would keep its mode
            with open(new, "wb", opener=lambda name, flags: _open_without_links(name, flags, mode)) as file:
                yield file
            new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def _open_without_links(path: str, flags: int, mode: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, mode)


@contextmanager
def locking_folder(folder: Path) -> Generator[None]:
    """Wait for other commands that write the folder. The lock ends with the process. Raises UnusableInput if the
    folder cannot be created."""
    folder = folder.resolve()
    lock = folder.with_name(f".{folder.name}.lock")
    while True:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("w")
        except OSError as error:
            raise UnusableInput(f"{folder}: cannot be written: {error.strerror}") from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:  # otherwise the lock's previous holder has removed the file
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)
                return


@contextmanager
def replacing_folder(folder: Path) -> Generator[Path]:
    """Yield a folder that gets its name only when complete and on the disk, and replaces another. Raises DiskError.

    If the process is killed, `folder` is complete or missing. A kill between the two renames leaves the complete new
    folder under the name `.NAME.partial`.
    """
    folder = folder.resolve()  # "." has no name, and a rename would replace a symbolic link
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, replaced = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.replaced")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        with raising_disk_errors(partial):
            partial.mkdir()
            yield partial
            sync_tree(partial)
            if folder.exists():
                folder.rename(replaced)
            partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def sync_paths(paths: Iterable[Path]) -> None:
    """Wait until the disk has the contents of these files, and the entries of these folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Synchronize a folder before a rename: a power failure then leaves no empty files under the final name."""
    sync_paths([*folder.rglob("*"), folder])
