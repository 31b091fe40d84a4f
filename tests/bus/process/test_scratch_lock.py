"""Tests: scratch folders of ended owners are removed, and folders of running owners and other users are kept."""

import fcntl
import os
import tempfile
import time
from pathlib import Path

import pytest

from asterism.bus.process import scratch_lock
from asterism.bus.process.scratch_lock import (
    SHARED_MEMORY_INODES,
    has_owner_ended,
    holding_scratch,
    link_cgroup,
    name_owner,
    name_scratch,
    remove_stale_scratch,
)


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the parent of all scratch folders."""
    monkeypatch.setattr(scratch_lock, "_PARENTS", ())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def abandon(path: Path) -> Path:
    """Leave a scratch folder with files, as a killed owner does."""
    lock = scratch_lock._create_scratch(path)  # pyright: ignore[reportPrivateUsage]
    (path / "file").write_text("x")
    os.close(lock)
    return path


def test_only_folders_of_ended_owners_are_removed(parent: Path) -> None:
    with holding_scratch(parent / name_scratch("living")) as living:
        dead = abandon(parent / name_scratch("dead"))
        without_lock = parent / name_scratch("without-lock")
        without_lock.mkdir()
        unrelated = abandon(parent / "unrelated")
        assert living.stat().st_mode & 0o777 == 0o700
        assert remove_stale_scratch() == [dead]
        assert all(path.is_dir() for path in (living, without_lock, unrelated))
    assert not living.exists()
    assert remove_stale_scratch() == []


def test_named_shared_memory_of_an_ended_owner_is_removed(parent: Path) -> None:
    """Only recorded files are removed. Their present names do not matter."""
    with (
        tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as dead,
        tempfile.NamedTemporaryFile(dir="/dev/shm") as living,
    ):
        folder = abandon(parent / name_scratch("dead"))
        (folder / "sglang-0").mkdir()
        (folder / "sglang-0" / SHARED_MEMORY_INODES).write_text(f"{Path(dead.name).stat().st_ino}\n1")
        renamed = Path(dead.name).rename(f"{dead.name}-renamed")
        assert remove_stale_scratch() == [folder]
        assert (renamed.exists(), Path(living.name).exists()) == (False, True)


def test_the_cgroup_of_an_ended_owner_is_removed_after_its_processes_have_ended(
    parent: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    dead = abandon(parent / name_scratch("dead"))
    cgroups = tmp_path_factory.mktemp("cgroups")
    (cgroups / dead.name / "1" / "call-1").mkdir(parents=True)
    other = cgroups / "other"
    other.mkdir()
    process = cgroups / dead.name / "1" / "process"  # rmdir fails, as for a cgroup with a process
    process.touch()
    link_cgroup(dead, cgroups / dead.name)
    link_cgroup(abandon(parent / name_scratch("linked-elsewhere")), other)
    assert remove_stale_scratch() == [parent / name_scratch("linked-elsewhere")]
    process.unlink()
    assert remove_stale_scratch() == [dead]
    assert list(cgroups.iterdir()) == [other]


def test_only_the_folder_of_an_ended_owner_is_replaced(parent: Path) -> None:
    path = abandon(parent / name_scratch("again"))
    with holding_scratch(path):
        assert not (path / "file").exists()
        with pytest.raises(FileExistsError), holding_scratch(path):
            pass
        assert path.is_dir()


def test_a_folder_that_is_removed_before_it_is_locked_is_created_again(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, removed = fcntl.flock, list[Path]()

    def lock_late(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not removed:
            removed.extend(remove_stale_scratch())
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with holding_scratch(parent / name_scratch("raced")) as path:
        assert removed == [path]
        assert remove_stale_scratch() == []
        assert path.is_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_folders_of_other_users_and_links_are_kept(parent: Path) -> None:
    foreign = abandon(parent / name_scratch("foreign"))
    os.chown(foreign, 1000, 1000)
    link = parent / name_scratch("link")
    link.symlink_to(abandon(parent / "target"))
    assert remove_stale_scratch() == []
    assert foreign.is_dir()
    assert link.resolve().is_dir()


@pytest.mark.slow
def test_trees_that_are_too_deep_or_not_readable_are_removed(parent: Path) -> None:
    path = abandon(parent / name_scratch("calls"))
    start = os.open(path, os.O_RDONLY)
    fd = start
    for _ in range(1200):
        os.mkdir("d", dir_fd=fd)
        deeper = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.fchmod(fd, 0)
    os.close(fd)
    assert remove_stale_scratch() == [path]
    assert not path.exists()


def test_an_owner_whose_folder_is_not_visible_does_not_count_as_ended(tmp_path: Path) -> None:
    with holding_scratch(tmp_path / "scratch") as path:
        owner = name_owner(path)
        assert not has_owner_ended(owner)
    assert has_owner_ended(owner)
    assert has_owner_ended(name_owner(abandon(tmp_path / "dead")))
    _, _, rest = owner.partition(":")
    device, inode, _ = rest.split(":", 2)
    boot = owner.partition(":")[0]
    for unknown in (f"another:{rest}", f"{boot}:{device}:{inode}:/nowhere/x", f"{boot}:1:{inode}:{path}", "", "a/1/2"):
        assert not has_owner_ended(unknown)
