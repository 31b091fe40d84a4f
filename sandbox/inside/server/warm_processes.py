"""The processes that a fork server forks ahead of its calls, with their folders and users.

`warm_processes` processes can run a program or a notebook. In addition, `spare_notebooks` processes are notebooks
without cells, each with the forked worker for its cells. The fork server forks spare notebooks only while it runs no
call. While memory or processes are short, the executor ends spare notebooks.
"""
# pathlib would be mapped into every forked process.
# ruff: noqa: PTH102

import contextlib
import errno
import os
import resource
import signal
import socket
import time
from collections import deque

from asterism.sandbox.inside.isolation.kernel_users import list_call_users
from asterism.sandbox.inside.server.call_cgroups import CallCgroup, CallCgroups
from asterism.sandbox.inside.server.call_process_handle import CallProcess, OutputPipe
from asterism.sandbox.inside.server.process_tree import ProcessTree
from asterism.sandbox.inside.server.scratch_folders import remove_folder
from asterism.sandbox.inside.wire.server_settings import ServerSettings
from asterism.sandbox.inside.zygote.zygote import Zygote

_SPARE_DESCRIPTORS = 16  # descriptors for files of /proc, without which no limit could be enforced
_RETRY_S = 0.1  # pause after a failed fork ahead of calls


class WarmProcesses:
    """Isolated processes that wait for a call.

    `folder` is for calls that cannot mount one. `own_users`: each call gets a kernel user of its own.
    """

    def __init__(
        self,
        settings: ServerSettings,
        zygote: Zygote,
        process_tree: ProcessTree,
        folder: str | None,
        cgroups: CallCgroups | None,
        own_users: bool,
    ) -> None:
        self._settings = settings
        self._zygote = zygote
        self._process_tree = process_tree
        self._folder = folder
        self._cgroups = cgroups
        self._waiting: deque[CallProcess] = deque()
        self._notebooks: deque[CallProcess] = deque()  # notebooks without cells
        self._fork_at = self._fork_notebooks_at = 0.0  # earliest times of the next forks
        self._num_forked = 0
        self._free_users = deque(list_call_users() if own_users else ())
        self._shared_user = self._free_users.pop() if own_users else None  # shared user of calls without their own

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self._settings.warm_processes

    def lacks_process(self, *, idle: bool) -> bool:
        """Return whether to fork a process now. Spare notebooks are forked only while the fork server is idle."""
        now = time.monotonic()
        if now < self._fork_at:
            return False
        may_fork_notebook = idle and now >= self._fork_notebooks_at
        return not self.is_full or (may_fork_notebook and len(self._notebooks) < self._settings.spare_notebooks)

    def has_process(self, *, notebook: bool) -> bool:
        return bool(self._waiting or (notebook and self._notebooks))

    def take(self, *, notebook: bool) -> CallProcess:
        """Take a process for a program, or for a notebook's first cell."""
        return (self._notebooks if notebook and self._notebooks else self._waiting).popleft()

    def remove_spare_notebooks(self, pause_s: float) -> list[CallProcess]:
        """Remove all spare notebooks; the caller kills them. No new one is forked for `pause_s`."""
        self._fork_notebooks_at = time.monotonic() + pause_s
        removed = list(self._notebooks)
        self._notebooks.clear()
        return removed

    def fork(self, *, as_notebook: bool = False) -> CallProcess:
        """Fork a process that isolates itself and then waits for a call or for a notebook's cells. Raises OSError."""
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as ends_of_child:
            on_error.callback(self._delay_forks)
            ours, theirs = socket.socketpair()
            on_error.callback(ours.close)
            ends_of_child.callback(theirs.close)
            out_read, out_write = _open_pipe(on_error, ends_of_child)
            err_read, err_write = _open_pipe(on_error, ends_of_child)
            if max(err_read, err_write) >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE_DESCRIPTORS:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._num_forked += 1
            folder, uid = self._allocate_folder_and_uid()
            cgroup = None
            on_error.callback(lambda: self._free(folder, uid, cgroup))
            fds = [theirs.fileno(), out_write, err_write]
            if self._cgroups is not None:
                cgroup = self._cgroups.acquire()
                fds.append(cgroup.open_members())
                ends_of_child.callback(os.close, fds[-1])
            pid = self._zygote.fork(fds, uid, folder, is_notebook=as_notebook)
            on_error.callback(_kill_and_reap, pid)
            ours.setblocking(False)
            limit = self._settings.output_bytes
            self._process_tree.prefer_for_oom_kill(pid)
            pipes = OutputPipe(out_read, limit), OutputPipe(err_read, limit)
            child = CallProcess(pid, ours, *pipes, folder, uid, cgroup)
            on_error.pop_all()
        (self._notebooks if as_notebook else self._waiting).append(child)
        return child

    def discard(self, child: CallProcess) -> None:
        """Kill a new process that the fork server cannot watch."""
        self._delay_forks()
        _kill_and_reap(child.pid)
        child.close()
        self.release(child)

    def release(self, child: CallProcess) -> None:
        """Remove the folder of a process that has ended, and free its uid and cgroup."""
        if not child.has_begun and not child.killed:
            self._delay_forks()
        for processes in (self._waiting, self._notebooks):
            if child in processes:
                processes.remove(child)
        was_short = child.has_begun and child.notebook_id is None and not child.pipes_polled
        self._free(child.folder, child.uid, child.cgroup, was_short=was_short)

    def _delay_forks(self) -> None:
        self._fork_at = time.monotonic() + _RETRY_S

    def _free(self, folder: str | None, uid: int | None, cgroup: CallCgroup | None, *, was_short: bool = False) -> None:
        if self._cgroups is not None and cgroup is not None:
            self._cgroups.release(cgroup, was_short=was_short)
        if folder is not None:
            with contextlib.suppress(OSError):  # no descriptor is left: the rest stays until the fork server ends
                remove_folder(folder)
        if uid is not None and uid != self._shared_user:
            self._free_users.append(uid)

    def _allocate_folder_and_uid(self) -> tuple[str | None, int | None]:
        """Return (folder, user) for the next call. A call with a mount namespace has a mount as its folder."""
        uid = self._free_users.popleft() if self._free_users else self._shared_user
        if self._folder is None:
            return None, uid
        folder = f"{self._folder}/{self._num_forked}"
        os.mkdir(folder, 0o700)
        if uid is not None:
            os.chown(folder, uid, uid)
        return folder, uid


def _open_pipe(on_error: contextlib.ExitStack, ends_of_child: contextlib.ExitStack) -> tuple[int, int]:
    read, write = os.pipe()
    on_error.callback(os.close, read)
    ends_of_child.callback(os.close, write)
    os.set_blocking(read, False)
    return read, write


def _kill_and_reap(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
