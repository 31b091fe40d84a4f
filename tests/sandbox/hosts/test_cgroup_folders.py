"""Tests of cgroup v2 on plain files; the memory controller is enabled only in a cgroup without processes."""

import os
import socket
from pathlib import Path

import pytest

from asterism.sandbox.hosts.cgroup_folders import CgroupFolder


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a cgroup that contains process 7. As in the kernel, a new cgroup has files."""
    make = os.mkdir

    def make_cgroup(path: Path, mode: int = 0o777) -> None:
        make(path, mode)
        for name in ("cgroup.procs", "cgroup.subtree_control"):
            Path(path, name).touch()

    parent = tmp_path / "parent"
    make_cgroup(parent)
    (parent / "cgroup.procs").write_text("7\n")
    monkeypatch.setattr(os, "mkdir", make_cgroup)
    monkeypatch.setattr("asterism.sandbox.hosts.cgroup_folders._find_cgroup", lambda _: parent)
    return parent


def test_the_processes_of_a_container_are_moved_before_memory_is_enabled(parent: Path) -> None:
    folder = CgroupFolder(7, "calls", may_move=True)
    assert (parent / "asterism-processes" / "cgroup.procs").read_text() == "7"
    assert [(path / "cgroup.subtree_control").read_text() for path in (parent, folder.path)] == ["+memory"] * 2


def test_neighbours_of_an_executor_are_moved_only_in_a_delegated_cgroup(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CgroupFolder(7, "one")
    assert not (parent / "asterism-processes").exists()
    (parent / "cgroup.subtree_control").write_text("")
    monkeypatch.setattr(os, "getxattr", lambda *_: b"1")
    CgroupFolder(7, "two")
    assert (parent / "asterism-processes" / "cgroup.procs").read_text() == "7"


def test_each_fork_server_gets_the_descriptor_of_its_own_folder(parent: Path) -> None:
    folder = CgroupFolder(7, "calls", may_move=True)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        folder.hand_over(8, os.getuid(), ours)
        _, (received,), _, _ = socket.recv_fds(theirs, 1, 1)
        assert os.path.samestat(os.fstat(received), (folder.path / "8").stat())
        os.close(received)
        assert (folder.path / "8" / "server" / "cgroup.procs").read_text() == "8"
        assert (folder.path / "8" / "cgroup.subtree_control").read_text() == "+memory"
        folder.path.rename(folder.path.with_name("lost"))
        folder.hand_over(9, os.getuid(), ours)
        assert socket.recv_fds(theirs, 1, 1)[:2] == (b"\0", [])
        theirs.close()
        folder.hand_over(9, os.getuid(), ours)  # the call ignores that the fork server has ended


def test_a_cgroup_without_a_memory_controller_is_refused_and_unchanged(parent: Path) -> None:
    (parent / "cgroup.subtree_control").unlink()
    (parent / "cgroup.subtree_control").mkdir()
    with pytest.raises(OSError, match="subtree_control"):
        CgroupFolder(7, "calls")
    assert not (parent / "calls").exists()
