"""Tests of calls' cgroups, on plain files with the names and contents of each cgroup version."""

import os
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest

from asterism.sandbox.inside.server.call_cgroups import CallCgroups

MIB = 1 << 20
VERSIONS: dict[str, dict[str, str]] = {
    "version 1": {
        "memory.limit_in_bytes": "9223372036854771712\n",
        "memory.swappiness": "60\n",
        "memory.usage_in_bytes": "0\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        "memory.failcnt": "0\n",
    },
    "version 2": {
        "memory.max": "max\n",
        "memory.swap.max": "max\n",
        "memory.current": "0\n",
        "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n",
    },
}


class Kernel:
    """A kernel that fills new folders with the files of a cgroup, and keeps folders with processes."""

    def __init__(self, folder: Path, version: str) -> None:
        self.folder = folder
        self.is_first = version == "version 1"
        self._files = {**VERSIONS[version], "cgroup.procs": ""}

    def mkdir(self, name: str, mode: int, *, dir_fd: int) -> None:
        assert os.path.samestat(os.fstat(dir_fd), self.folder.stat())
        self.folder.joinpath(name).mkdir()
        for file, content in self._files.items():
            self.folder.joinpath(name, file).write_text(content)

    def rmdir(self, name: str, *, dir_fd: int) -> None:
        if self.folder.joinpath(name, "cgroup.procs").read_text():
            raise OSError("busy")
        shutil.rmtree(self.folder / name)

    def read_limit(self, name: str) -> int:
        file = "memory.limit_in_bytes" if self.is_first else "memory.max"
        return int(self.folder.joinpath(name, file).read_text().split()[0][:10].rstrip("x"))

    def set_use(self, name: str, used: int) -> None:
        file = "memory.usage_in_bytes" if self.is_first else "memory.current"
        self.folder.joinpath(name, file).write_text(f"{used}\n")

    def kill(self, name: str, num_killed: int, num_limit_hits: int) -> None:
        if self.is_first:
            self.folder.joinpath(name, "memory.oom_control").write_text(f"under_oom 0\noom_kill {num_killed}\n")
            self.folder.joinpath(name, "memory.failcnt").write_text(f"{num_limit_hits}\n")
        else:
            events = f"max 7\noom {num_limit_hits}\noom_kill {num_killed}\n"
            self.folder.joinpath(name, "memory.events").write_text(events)

    def list_cgroups(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.is_dir())


@pytest.fixture(params=VERSIONS)
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> Kernel:
    for file, content in VERSIONS[request.param].items():
        (tmp_path / file).write_text(content)
    return Kernel(tmp_path, request.param)


@pytest.fixture
def cgroups(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Generator[CallCgroups]:
    folder = os.open(kernel.folder, os.O_RDONLY | os.O_DIRECTORY)
    with monkeypatch.context() as patched:
        patched.setattr("asterism.sandbox.inside.server.call_cgroups.os", _FakeOs(kernel))
        yield CallCgroups(folder, 1024)
    os.close(folder)


class _FakeOs:
    def __init__(self, kernel: Kernel) -> None:
        self.mkdir, self.rmdir = kernel.mkdir, kernel.rmdir

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


def test_a_cgroup_allows_a_quarter_more_memory_than_a_call_and_a_checkpoint_needs_half(
    kernel: Kernel, cgroups: CallCgroups
) -> None:
    cgroup = cgroups.acquire()
    assert kernel.read_limit(cgroup.name) == 1280 * MIB
    kernel.set_use(cgroup.name, 640 * MIB)
    assert cgroup.has_room_for_checkpoint()
    kernel.set_use(cgroup.name, 641 * MIB)
    assert not cgroup.has_room_for_checkpoint()


def test_a_kill_is_attributed_to_the_limit_that_was_hit(kernel: Kernel, cgroups: CallCgroups) -> None:
    cgroup = cgroups.acquire()
    assert cgroup.find_culprit() is None
    kernel.kill(cgroup.name, num_killed=0, num_limit_hits=3)  # the kernel reclaimed memory and killed no process
    assert cgroup.find_culprit() is None
    kernel.kill(cgroup.name, num_killed=1, num_limit_hits=4)
    assert [cgroup.find_culprit(), cgroup.find_culprit()] == ["call", "call"]
    kernel.kill(cgroup.name, num_killed=2, num_limit_hits=4)  # the kernel kills another process that could not allocate
    assert cgroup.find_culprit() == "call"
    cgroup.begin_call()
    kernel.kill(cgroup.name, num_killed=3, num_limit_hits=4)
    assert cgroup.find_culprit() == "machine"


def test_only_a_cgroup_without_leftover_memory_is_reused(kernel: Kernel, cgroups: CallCgroups) -> None:
    clean, full, killed = [cgroups.acquire() for _ in range(3)]
    kernel.set_use(clean.name, 20 * MIB)
    kernel.set_use(full.name, 50 * MIB)
    kernel.kill(killed.name, num_killed=1, num_limit_hits=1)
    for cgroup in (clean, full, killed):
        cgroups.release(cgroup)
    assert kernel.list_cgroups() == [clean.name]
    assert cgroups.acquire() is clean
    kernel.set_use(clean.name, 50 * MIB)
    cgroups.release(clean, was_short=True)
    assert cgroups.acquire() is clean
    assert cgroups.acquire().name not in (full.name, killed.name)


def test_a_cgroup_with_processes_is_removed_after_their_exit(kernel: Kernel, cgroups: CallCgroups) -> None:
    busy, other = cgroups.acquire(), cgroups.acquire()
    members = kernel.folder / busy.name / "cgroup.procs"
    members.write_text("17\n")
    for cgroup in (busy, other):
        kernel.set_use(cgroup.name, 1000 * MIB)
    cgroups.release(busy)
    assert kernel.list_cgroups() == [busy.name, other.name]
    members.write_text("")
    cgroups.release(other)
    assert kernel.list_cgroups() == []


def test_a_cgroup_that_cannot_be_limited_is_not_used(
    kernel: Kernel, cgroups: CallCgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_files", {"cgroup.procs": ""})
    with pytest.raises(FileNotFoundError):
        cgroups.acquire()
    assert kernel.list_cgroups() == []
