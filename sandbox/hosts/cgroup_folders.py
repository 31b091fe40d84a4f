"""Creates the cgroup folders of fork servers, below the cgroup of the executor or of its container.

    NAME/              one per executor or container
    NAME/PID/          one per fork server, owned by the server's user: the server creates the cgroups of calls
    NAME/PID/server    the fork server and its zygote: in version 2, only cgroups without children have processes

Version 2 also requires a separate cgroup for the other processes of the parent. In a container, the executor always
moves these processes; on this machine, only if systemd has delegated the cgroup to this user.
"""

import contextlib
import os
import socket
from pathlib import Path

from asterism.bus.process.scratch_lock import remove_cgroup

_MOUNT = Path("/sys/fs/cgroup")
_MOVED_PROCESSES = "asterism-processes"
_DELEGATION_MARKS = ("user.delegate", "trusted.delegate")


class CgroupFolder:
    """The cgroup folder NAME. Raises OSError without permission to create it, or without a memory controller."""

    def __init__(self, neighbour: int, name: str, *, may_move: bool = False) -> None:
        parent = _find_cgroup(neighbour)
        if parent.name == _MOVED_PROCESSES:
            parent = parent.parent
        _enable_memory(parent, may_move=may_move)
        self.path = parent / name
        self.path.mkdir()
        try:
            _enable_memory(self.path)
        except OSError:
            self.path.rmdir()
            raise

    def hand_over(self, server: int, owner: int, connection: socket.socket) -> None:
        """Move a waiting fork server into a folder of its own, and send it the folder's descriptor.

        Without permission, the message has no descriptor. A fork server that has ended gets no message.
        """
        with contextlib.ExitStack() as files:
            descriptors: list[int] = []
            with contextlib.suppress(OSError):
                folder = self._create_server_folder(server, owner)
                descriptors.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
                files.callback(os.close, descriptors[0])
            with contextlib.suppress(OSError):
                socket.send_fds(connection, [b"\0"], descriptors)

    def _create_server_folder(self, server: int, owner: int) -> Path:
        self._remove_unused()
        folder = self.path / str(server)
        folder.mkdir()
        _enable_memory(folder)
        (folder / "server").mkdir()
        (folder / "server" / "cgroup.procs").write_text(str(server))
        for path in (folder, folder / "cgroup.procs"):
            os.chown(path, owner, -1)
        return folder

    def _remove_unused(self) -> None:
        """Remove the folders of fork servers that have ended."""
        for server in self.path.glob("*/server"):
            with contextlib.suppress(OSError):
                server.rmdir()
                remove_cgroup(server.parent, delays_s=(0.0,))


def _find_cgroup(pid: int) -> Path:
    """Return the process's cgroup folder with the memory controller. Raises FileNotFoundError."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        mount = _MOUNT if not controllers else _MOUNT / "memory"
        folder = Path(f"{mount}{path}")
        if controllers not in ("", "memory") or not (folder / "cgroup.procs").exists():
            continue
        if str(pid) in (folder / "cgroup.procs").read_text().split():
            return folder
    raise FileNotFoundError("no cgroup with a memory controller")


def _enable_memory(folder: Path, *, may_move: bool = False) -> None:
    """Enable the memory controller for the folder's children; version 1 needs nothing. Raises OSError."""
    control = folder / "cgroup.subtree_control"
    if not control.exists() or "memory" in control.read_text().split():
        return
    if may_move or _is_delegated(folder):
        leaf = folder / _MOVED_PROCESSES
        leaf.mkdir(exist_ok=True)
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (leaf / "cgroup.procs").write_text(pid)
    control.write_text("+memory")


def _is_delegated(folder: Path) -> bool:
    for mark in _DELEGATION_MARKS:
        with contextlib.suppress(OSError):
            if os.getxattr(folder, mark) == b"1":
                return True
    return False
