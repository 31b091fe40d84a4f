"""Tests of the removal of calls' folders."""

import os
from pathlib import Path

import pytest

from asterism.sandbox.inside.server.scratch_folders import remove_folder


@pytest.mark.slow
def test_a_deep_folder_without_permissions_is_removed_and_no_other_file(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("x")
    outside.chmod(0o600)
    folder = tmp_path / "call"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    (folder / "parent").symlink_to(tmp_path)
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("a folder with a long name", dir_fd=descriptor)
        inner = os.open("a folder with a long name", os.O_RDONLY, dir_fd=descriptor)
        os.close(os.open("file", os.O_CREAT, dir_fd=inner))
        os.fchmod(descriptor, 0o500)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    remove_folder(str(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside"]
    assert outside.read_text() == "x"
    assert outside.stat().st_mode & 0o777 == 0o600
