"""Moves a fork server into namespaces, with a root that contains only Python and system libraries.

Works as root and as an ordinary user. Root builds the new root first, because only root may be able
to read the interpreter's folder, and then drops to an unprivileged user.

    user      allows the fork server to create further namespaces; no rights outside
    network   empty: not even the loopback device is up
    ipc       no access to the machine's shared memory
    pid       the fork server is process 1: when it ends, the kernel kills its descendants
    mount     read-only: interpreter, its libraries and packages, /usr; no /proc, /sys, /etc or home
"""
# pathlib would be mapped into every forked process.
# ruff: noqa: PTH100, PTH102, PTH103, PTH112, PTH114, PTH115, PTH211

import contextlib
import os
import resource
import signal
from collections.abc import Sequence
from typing import NamedTuple

from asterism.sandbox.inside.isolation import syscalls
from asterism.sandbox.inside.isolation.kernel_users import OfferedUsers

NOBODY = 65534
NAMESPACE_NAMES = ("user", "pid", "mount", "network", "ipc")
SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib64")
DEVICES = ("null", "zero", "full", "random", "urandom")
SCRATCH_PARENT = "/scratch"  # not /tmp, which may contain the interpreter
SCRATCH = f"{SCRATCH_PARENT}/own"  # mount point of each call's folder
OWN_TMP = f"{SCRATCH_PARENT}/own-tmp"  # mount point of each call's /tmp if parts of the interpreter are below /tmp
_TMP = "/tmp"
_NEW_ROOT = _TMP  # mount point of the new root while it is built; visible only to this process


class EnteredNamespaces(NamedTuple):
    proc_fd: int  # descriptor of the pid namespace's /proc
    has_users: bool  # calls can have kernel users of their own
    mounts_in_tmp: tuple[str, ...]  # parts of the interpreter inside a call's /tmp, below OWN_TMP


def enter_namespaces(
    visible_folders: Sequence[str], server_fds: Sequence[int], users: OfferedUsers | None = None
) -> EnteredNamespaces:
    """Fork the fork server into new namespaces, and return only in the forked process.

    The calling process closes `server_fds`, waits for the fork server and exits with its exit code.
    Raises OSError if the kernel refuses.
    """
    syscalls.die_with_parent(signal.SIGKILL)
    if os.getuid() == 0:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        mounts_in_tmp = _build_root(visible_folders)
        with contextlib.suppress(ValueError):  # root lacks CAP_SYS_RESOURCE
            # The kernel also counts the signals of all calls together, against this limit.
            resource.setrlimit(resource.RLIMIT_SIGPENDING, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        _drop_root(NOBODY if users is None else users.first)
        has_users = _unshare_all(users)
    else:
        has_users = _unshare_all(users)
        mounts_in_tmp = _build_root(visible_folders)
    _fork_first_process(server_fds)
    return EnteredNamespaces(_mount_own_proc(), has_users, mounts_in_tmp)


def _drop_root(user: int) -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(user, user, user)
    _recover_from_change_of_user()


def _recover_from_change_of_user() -> None:
    syscalls.make_dumpable()
    syscalls.die_with_parent(signal.SIGKILL)


def _unshare_all(users: OfferedUsers | None) -> bool:
    """Enter new namespaces. If the executor has mapped the users, become the first user and return True."""
    user, group = os.geteuid(), os.getegid()
    syscalls.unshare(
        syscalls.CLONE_NEWUSER
        | syscalls.CLONE_NEWNS
        | syscalls.CLONE_NEWPID
        | syscalls.CLONE_NEWNET
        | syscalls.CLONE_NEWIPC
    )
    write_once("/proc/self/setgroups", "deny")
    if users is not None and users.request_map():
        users.become_first()
        _recover_from_change_of_user()
        return True
    write_once("/proc/self/uid_map", f"{user} {user} 1")
    write_once("/proc/self/gid_map", f"{group} {group} 1")
    return False


def write_once(path: str, text: str) -> None:
    """Write a file of /proc in one call: the kernel accepts only one write of a map."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _build_root(visible_folders: Sequence[str]) -> tuple[str, ...]:
    """Build and enter the new root; return the mounts in a call's /tmp, below OWN_TMP."""
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    folders = _drop_nested([*SYSTEM_FOLDERS, *visible_folders])
    links = {folder: os.readlink(folder) for folder in folders if folder in SYSTEM_FOLDERS and os.path.islink(folder)}
    sources = {_place(folder): os.open(folder, os.O_PATH) for folder in folders if folder not in links}
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    proc = os.open("/proc", os.O_PATH)
    proc_now = f"/proc/{os.getpid()}/fd"
    root = _NEW_ROOT
    syscalls.mount("tmpfs", root, "tmpfs", syscalls.MS_NOSUID, "size=1m,mode=755")
    for folder, source in sources.items():
        _bind_mount(f"{proc_now}/{source}", root + folder)
        syscalls.set_mount_attributes(
            root + folder, syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID, recursive=True
        )
    for folder, target in links.items():
        os.symlink(target, root + folder)
    os.makedirs(f"{root}/dev", exist_ok=True)
    for name, source in devices.items():
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY))
        syscalls.mount(f"{proc_now}/{source}", f"{root}/dev/{name}", None, syscalls.MS_BIND)
        # Calls can still write to the device, but not set the times of the shared file.
        syscalls.set_mount_attributes(f"{root}/dev/{name}", syscalls.MOUNT_ATTR_RDONLY, recursive=False)
    os.makedirs(root + SCRATCH)
    os.symlink(SCRATCH, f"{root}/dev/shm")
    mounts_in_tmp = tuple(target for target in sources if target.startswith(f"{OWN_TMP}/"))
    os.symlink(OWN_TMP if mounts_in_tmp else SCRATCH, root + _TMP)
    _bind_mount(f"{proc_now}/{proc}", f"{root}/proc")
    for source in (*sources.values(), *devices.values(), proc):
        os.close(source)
    syscalls.set_mount_attributes(root, syscalls.MOUNT_ATTR_RDONLY, recursive=False)
    syscalls.pivot_to(root)
    return mounts_in_tmp


def _place(folder: str) -> str:
    """Return the path of a visible folder in the new root, in which /tmp is a link."""
    return OWN_TMP + folder.removeprefix(_TMP) if folder.startswith(f"{_TMP}/") else folder


def mount_scratch(options: str, mounts_in_tmp: Sequence[str]) -> None:
    """Mount the private folder of a call at SCRATCH, and also as its /tmp if possible.

    With `mounts_in_tmp`, /tmp is another folder of the same file system, into which the read-only
    parts of the interpreter are mounted again. Raises OSError.
    """
    syscalls.mount("tmpfs", SCRATCH, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
    if not mounts_in_tmp:
        return
    own, tmp = f"{SCRATCH}/own", f"{SCRATCH}/tmp"
    os.mkdir(own, 0o700)
    os.mkdir(tmp, 0o700)
    for folder in mounts_in_tmp:
        _bind_mount(folder, tmp + folder.removeprefix(OWN_TMP))
    _bind_mount(tmp, OWN_TMP)
    _bind_mount(own, SCRATCH)  # the mount covers the folder that contains `own` and `tmp`


def _bind_mount(source: str, target: str) -> None:
    os.makedirs(target, exist_ok=True)
    syscalls.mount(source, target, None, syscalls.MS_BIND | syscalls.MS_REC)


def _drop_nested(folders: Sequence[str]) -> list[str]:
    """Return the existing folders that are not inside another one.

    /tmp itself is left out: an interpreter with this prefix would show all temporary files of the machine.
    """
    present = sorted({os.path.abspath(folder) for folder in folders if os.path.isdir(folder)} - {_TMP})
    outermost: list[str] = []
    for folder in present:
        if not any(folder.startswith(f"{other}/") for other in outermost):
            outermost.append(folder)
    return outermost


def _fork_first_process(server_fds: Sequence[int]) -> None:
    """Fork, because a new pid namespace begins with the next child. The parent waits and exits."""
    child = os.fork()
    if child == 0:
        syscalls.die_with_parent(signal.SIGKILL)
        return
    for fd in server_fds:
        os.close(fd)

    def kill_child(*_: object) -> None:
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill_child)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _mount_own_proc() -> int:
    """Open a /proc of this pid namespace, and cover it with an empty folder for calls."""
    syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    syscalls.mount("tmpfs", "/proc", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=4k,nr_inodes=1,mode=555")
    syscalls.set_mount_attributes("/proc", syscalls.MOUNT_ATTR_RDONLY, recursive=False)
    return proc
