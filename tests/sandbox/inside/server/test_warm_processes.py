"""Tests of the kernel users of forked processes; a free user goes to the end of the queue."""

import os
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from asterism.sandbox.inside.isolation import kernel_users
from asterism.sandbox.inside.server.call_process_handle import CallProcess
from asterism.sandbox.inside.server.process_tree import ProcessTree
from asterism.sandbox.inside.server.warm_processes import WarmProcesses
from asterism.sandbox.inside.wire.server_settings import ServerSettings

pytestmark = pytest.mark.slow
SETTINGS = ServerSettings("bare", True, (), 1.0, 1, 1, 1, 1)


class PausingZygote:
    """A zygote whose processes sleep until they are killed."""

    def fork(self, fds: Sequence[int], uid: int | None, folder: str | None, *, is_notebook: bool) -> int:
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        return pid


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> WarmProcesses:
    monkeypatch.setattr(kernel_users, "USERS_PER_SERVER", 5)
    monkeypatch.setattr(os, "getuid", lambda: 2_500_000_000)
    proc_fd = os.open("/proc", os.O_RDONLY)
    return WarmProcesses(SETTINGS, cast(Any, PausingZygote()), ProcessTree(proc_fd), None, None, own_users=True)


def end(warm: WarmProcesses, child: CallProcess) -> None:
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    child.close()
    warm.release(child)


def test_a_free_user_goes_to_the_end_of_the_queue(warm: WarmProcesses) -> None:
    users: list[int | None] = []
    for _ in range(6):
        child = warm.fork()
        users.append(child.uid)
        end(warm, child)
    assert users == [2_500_000_001, 2_500_000_002, 2_500_000_003] * 2


def test_calls_beyond_the_number_of_users_share_the_last_user(warm: WarmProcesses) -> None:
    children = [warm.fork() for _ in range(5)]
    assert [child.uid for child in children] == [2_500_000_000 + number for number in (1, 2, 3, 4, 4)]
    for child in children:
        end(warm, child)
    later = [warm.fork() for _ in range(3)]
    assert [child.uid for child in later] == [2_500_000_000 + number for number in (1, 2, 3)]
    for child in later:
        end(warm, child)


def test_a_discarded_process_leaves_no_descriptor_and_no_zombie(warm: WarmProcesses) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    child = warm.fork()
    warm.discard(child)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, 0)
    assert not warm.has_process(notebook=True)


def test_the_users_of_servers_with_neighbouring_pids_do_not_overlap() -> None:
    firsts = [kernel_users.get_first_user(pid) for pid in (1, 2, 3, 799_999)]
    assert all(second - first >= kernel_users.USERS_PER_SERVER for first, second in pairwise(firsts))
    assert firsts[-1] + kernel_users.USERS_PER_SERVER < 2**32 - 2
    assert firsts[0] == 2_500_002_048
