"""Writes that the disk refuses."""

import errno
from pathlib import Path

import pytest

from configs.atomic_write import DiskError, raising_disk_errors, write_atomically


def test_a_disk_error_names_the_file_even_if_the_system_does_not(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskError, match=r"^/dev/full: No space left on device$"),
        raising_disk_errors(Path("/dev/full")),
    ):
        Path("/dev/full").write_bytes(b"x")
    with pytest.raises(DiskError, match=r"^the/file: Read-only file system$"), raising_disk_errors(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system", "the/file")


def test_other_errors_are_not_reported_as_disk_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), raising_disk_errors(tmp_path):
        (tmp_path / "nowhere" / "file").write_bytes(b"x")


def test_a_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "boots"
    write_atomically(path, b"1\n")
    (tmp_path / "boots.new").symlink_to("/dev/full")
    with pytest.raises(DiskError, match=r"boots\.new: No space left on device$"):
        write_atomically(path, b"2\n")
    assert path.read_bytes() == b"1\n"
    assert [file.name for file in tmp_path.iterdir()] == ["boots"]
    write_atomically(path, b"2\n")
    assert path.read_bytes() == b"2\n"
