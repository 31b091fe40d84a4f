"""The processes that a fork server forks ahead of its calls, with their folders and users."""
# pathlib would be mapped into every forked process.
# ruff: noqa: PTH102

import os
import socket
from collections import deque

from sandbox.inside.server.call_process_handle import CallProcess, OutputPipe
from sandbox.inside.server.process_tree import ProcessTree
from sandbox.inside.server.scratch_folders import remove_folder
from sandbox.inside.wire.server_settings import ServerSettings
from sandbox.inside.zygote.zygote import Zygote

# Where root has no namespaces, each call gets an unassigned uid from its server's range.
_FIRST_FREE_UID, _UIDS_PER_SERVER, _MAX_SERVERS = 2_000_000_000, 1_024, 2_000_000


class WarmProcesses:
    """Isolated processes that wait for a call. `folder` is for calls that cannot mount one."""

    def __init__(self, settings: ServerSettings, zygote: Zygote, process_tree: ProcessTree, folder: str | None) -> None:
        self._settings = settings
        self._zygote = zygote
        self._process_tree = process_tree
        self._folder = folder
        self._waiting: deque[CallProcess] = deque()
        self._num_forked = 0
        first_uid = _FIRST_FREE_UID + os.getpid() % _MAX_SERVERS * _UIDS_PER_SERVER
        self._free_uids = deque(range(first_uid, first_uid + _UIDS_PER_SERVER))

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self._settings.warm_processes

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def take(self) -> CallProcess:
        return self._waiting.popleft()

    def fork(self) -> CallProcess:
        """Forks a process, which isolates itself and then waits for a call."""
        ours, theirs = socket.socketpair()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        self._num_forked += 1
        folder, uid = self._allocate_folder_and_uid()
        pid = self._zygote.fork((theirs.fileno(), out_write, err_write), uid, folder)
        theirs.close()
        os.close(out_write)
        os.close(err_write)
        ours.setblocking(False)
        os.set_blocking(out_read, False)
        os.set_blocking(err_read, False)
        limit = self._settings.output_bytes
        self._process_tree.prefer_for_oom_kill(pid)
        child = CallProcess(pid, ours, OutputPipe(out_read, limit), OutputPipe(err_read, limit), folder, uid)
        self._waiting.append(child)
        return child

    def release(self, child: CallProcess) -> None:
        """Removes the folder of a process that has ended, and frees its uid."""
        if child in self._waiting:
            self._waiting.remove(child)
        if child.folder is not None:
            remove_folder(child.folder)
        if child.uid is not None and child.uid not in self._free_uids:
            self._free_uids.appendleft(child.uid)  # at the front: the shared uid stays the last

    def _allocate_folder_and_uid(self) -> tuple[str | None, int | None]:
        """(folder, uid) of the next call, if it cannot have a mount and a user namespace."""
        if self._folder is None:
            return None, None
        folder = f"{self._folder}/{self._num_forked}"
        os.mkdir(folder, 0o700)
        if os.getuid() != 0:
            return folder, None
        # If there are too many calls, they share the last uid.
        uid = self._free_uids.popleft() if len(self._free_uids) > 1 else self._free_uids[0]
        os.chown(folder, uid, uid)
        return folder, uid
