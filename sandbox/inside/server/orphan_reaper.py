"""Kills the processes that a call left running, if the call had no pid namespace."""

import contextlib
import os
import resource
import signal

from asterism.sandbox.inside.server.process_tree import ProcessTree

_UNUSED_UID = 1_999_999_999  # user of the killer, so that killed processes cannot signal it


def kill_groups(*leaders: int | None) -> None:
    """Kill whole process groups in one step: hundreds of processes can occupy all CPUs."""
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError):
            if leader is not None:
                os.killpg(leader, signal.SIGKILL)


def kill_orphans(processes: ProcessTree, known: set[int]) -> None:
    """Kill and reap all descendants, except the `known` children and their descendants.

    A fork bomb is faster than a listing of its processes, and each exit makes room for a fork.
    Each call of root has its own uid: the kernel kills all processes of that uid in one step. The
    orphans of a call that still runs have its uid and stay until it ends. Without root, whole
    process groups are killed, and the remaining orphans lose the right to fork.
    """
    running = {_read_uid(processes, pid) for pid in known} - {0}
    while children := _list_orphans(processes, known, running):
        orphans = processes.list_with_descendants(children)
        if os.getuid() == 0:
            for user in {_read_uid(processes, pid) for pid in orphans} - {0}:
                _kill_user(user)
        else:
            spared = [os.getpid(), *processes.list_with_descendants(known)]  # orphans can join these groups
            for group in _list_groups(orphans) - _list_groups(spared):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_NPROC, (0, 0))
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def _list_orphans(processes: ProcessTree, known: set[int], running: set[int]) -> set[int]:
    """Return the children that are neither known nor owned by the user of a running call."""
    children = {*processes.list_children(os.getpid())} - known
    if os.getuid() != 0:
        return children
    return {pid for pid in children if _read_uid(processes, pid) not in running}


def _kill_user(user: int) -> None:
    try:
        pid = os.fork()
    except OSError:  # no process is left: the caller kills the processes one by one
        return
    if pid == 0:
        try:
            os.setresuid(_UNUSED_UID, user, _UNUSED_UID)
            os.kill(-1, signal.SIGKILL)  # all processes of this user, except this one
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _list_groups(pids: list[int]) -> set[int]:
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            found.add(os.getpgid(pid))
    return found


def _read_uid(processes: ProcessTree, pid: int) -> int:
    """Return the user, or 0 if the process has ended. Root can own the /proc folder of another user's process."""
    lines = processes.read_file(pid, "status").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(b"Uid:")), 0)
