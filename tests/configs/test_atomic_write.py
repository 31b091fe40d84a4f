"""Writes of files and folders: errors of the disk, concurrent commands, links and access rights."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asterism.configs import atomic_write
from asterism.configs.atomic_write import (
    DiskError,
    locking_folder,
    raising_disk_errors,
    replacing_file,
    replacing_folder,
    write_atomically,
)


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


def open_full_disk(path: str, flags: int, mode: int) -> int:
    Path(path).touch()
    return os.open("/dev/full", flags)


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "boots"
    write_atomically(path, b"1\n")
    with monkeypatch.context() as patch:
        patch.setattr(atomic_write, "_open_without_links", open_full_disk)
        with pytest.raises(DiskError, match=r"boots\.new: No space left on device$"):
            write_atomically(path, b"2\n")
    assert path.read_bytes() == b"1\n"
    assert [file.name for file in tmp_path.iterdir()] == ["boots"]
    write_atomically(path, b"2\n")
    assert path.read_bytes() == b"2\n"


@pytest.mark.real_clock
def test_commands_write_a_folder_one_after_another(tmp_path: Path) -> None:
    events: list[str] = []

    def write(_: int) -> None:
        with locking_folder(tmp_path / "out"):
            events.append("begin")
            time.sleep(0.002)
            events.append("end")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    assert events == ["begin", "end"] * 8
    assert list(tmp_path.iterdir()) == []


def test_a_symbolic_link_is_kept_when_its_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    for content in ("1", "2"):
        with replacing_folder(tmp_path / "link") as partial:
            (partial / "file").write_text(content)
    assert (tmp_path / "target" / "file").read_text() == "2"
    assert {path.name for path in tmp_path.iterdir()} == {"link", "target"}


@pytest.mark.parametrize("link", ["summary.json", "summary.json.new"])
@pytest.mark.parametrize("writer", ["write_atomically", "replacing_file"])
def test_a_symbolic_link_to_a_file_is_replaced_and_its_target_unchanged(tmp_path: Path, link: str, writer: str) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "summary.json"
    (tmp_path / "run" / link).symlink_to(outside)
    if writer == "write_atomically":
        write_atomically(path, b"new")
    else:
        with replacing_file(path) as file:
            file.write(b"new")
    assert (path.read_bytes(), path.is_symlink(), outside.read_text()) == (b"new", False, "kept")


def test_a_private_file_is_readable_only_by_the_user_even_if_it_replaces_a_file(tmp_path: Path) -> None:
    path, new = tmp_path / "config.toml", tmp_path / "config.toml.new"
    for each in (path, new):
        each.write_text("old")
        each.chmod(0o644)
    write_atomically(path, b"token", is_private=True)
    assert path.read_bytes() == b"token"
    assert path.stat().st_mode & 0o777 == 0o600
