"""Ends what a call has left running, where no pid namespace does. Standard library only."""
# pathlib would be mapped into every forked process.
# ruff: noqa: PTH123, PTH208

import contextlib
import os
import resource
import signal

_OUT_OF_REACH = 1_999_999_999  # a user that nobody is: who kills cannot be killed or stopped by those whom it kills


def end_groups(*leaders: int | None) -> None:
    """All in their process groups, at once and before anybody counts them: they may be hundreds that leave no processor."""
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError):
            if leader is not None:
                os.killpg(leader, signal.SIGKILL)


def end_orphans(known: set[int]) -> None:
    """Kills and reaps all that descends from this process, but for its `known` children and what descends from them.

    Code that forks without end is faster than whoever lists its processes, and each death makes room for a birth. So
    root, whose calls are users of their own, has the kernel kill all of such a user at once; others have it kill whole
    process groups, and take the right to fork from each orphan that is left.
    """
    while children := _children(os.getpid()) - known:
        orphans = _with_descendants(children)
        if os.getuid() == 0:
            for user in {_user(pid) for pid in orphans} - {0}:
                _kill_all_of(user)
        else:
            spared = [os.getpid(), *_with_descendants(known)]  # whose groups an orphan may have joined
            for group in _groups(orphans) - _groups(spared):
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


def _kill_all_of(user: int) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(_OUT_OF_REACH, user, _OUT_OF_REACH)
            os.kill(-1, signal.SIGKILL)  # all that this user may, but for this process
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _groups(pids: list[int]) -> set[int]:
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            found.add(os.getpgid(pid))
    return found


def _user(pid: int) -> int:
    """0 if it has ended. Its folder in /proc may be root's where it is not dumpable."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Uid:"))
    return 0


def _with_descendants(pids: set[int]) -> list[int]:
    found, new = list(pids), list(pids)
    while new:
        new = [child for pid in new for child in _children(pid)]
        found += new
    return found


def _children(pid: int) -> set[int]:
    """Of all its threads; none if it has ended."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found.update(int(child) for child in file.read().split())
    return found
