"""Writing to a disk that refuses."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from configs.disk import DiskRefused, write_whole, writing


def test_a_refused_file_is_named_also_where_the_system_does_not(tmp_path: Path) -> None:
    with pytest.raises(DiskRefused, match=r"^/dev/full: No space left on device$"), writing(Path("/dev/full")):
        Path("/dev/full").write_bytes(b"x")
    with pytest.raises(DiskRefused, match=r"^the/file: Read-only file system$"), writing(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system", "the/file")


def test_what_is_no_refusal_of_the_disk_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), writing(tmp_path):
        (tmp_path / "nowhere" / "file").write_bytes(b"x")


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "boots"
    write_whole(path, b"1\n")
    (tmp_path / "boots.new").symlink_to("/dev/full")
    with pytest.raises(DiskRefused, match=r"boots\.new: No space left on device$"):
        write_whole(path, b"2\n")
    assert path.read_bytes() == b"1\n"
    assert [each.name for each in tmp_path.iterdir()] == ["boots"]
    write_whole(path, b"2\n")
    assert path.read_bytes() == b"2\n"
