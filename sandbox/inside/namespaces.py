"""What a fork server enters once, before it runs anything: namespaces, and a root that shows Python and nothing else.

Standard library only. Works as root and as an ordinary user: root first builds the new root, because the interpreter
may lie where nobody else may look, and then becomes an ordinary user itself.

    user      a namespace in which the fork server may make further ones; no right outside it
    network   empty: not even a loopback device that is up
    ipc       none of the machine's shared memory
    pid       the fork server is process 1: when it ends, the kernel ends all that it started
    mount     read-only: interpreter, its libraries and packages, /usr; no /proc, no /sys, no /etc, no home
"""
# pathlib would be mapped into every forked process.
# ruff: noqa: PTH100, PTH103, PTH110, PTH112, PTH114, PTH115, PTH211

import os
import signal
from collections.abc import Sequence

from sandbox.inside import kernel

NOBODY = 65534
NAMES = ("user", "pid", "mount", "network", "ipc")
SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib64")
DEVICES = ("null", "zero", "full", "random", "urandom")
SCRATCH_PARENT = "/scratch"  # not /tmp, where an interpreter may lie
SCRATCH = f"{SCRATCH_PARENT}/own"  # where each call mounts its own folder
_BUILD_AT = "/tmp"  # covered by the new root while it is made; seen by this process alone


def enter(visible_folders: Sequence[str], fds_of_server: Sequence[int]) -> int:
    """Returns in the fork server, with a descriptor of a /proc of its own. The process that called waits for it and
    ends with its exit code; it keeps none of `fds_of_server`. Raises OSError where the kernel refuses.
    """
    kernel.die_with_parent(signal.SIGKILL)
    if os.getuid() == 0:
        kernel.unshare(kernel.CLONE_NEWNS)
        _build_root(visible_folders)
        _become_nobody()
        _unshare_all()
    else:
        _unshare_all()
        _build_root(visible_folders)
    _fork_first_process(fds_of_server)
    return _own_proc()


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.allow_own_proc()
    kernel.die_with_parent(signal.SIGKILL)  # a change of user clears it


def _unshare_all() -> None:
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(
        kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
    )
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _build_root(visible_folders: Sequence[str]) -> None:
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    folders = _without_nested([*SYSTEM_FOLDERS, *visible_folders])
    sources = {folder: os.open(folder, os.O_PATH) for folder in folders if not os.path.islink(folder)}
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    proc = os.open("/proc", os.O_PATH)
    links = {folder: os.readlink(folder) for folder in folders if os.path.islink(folder)}
    proc_now = f"/proc/{os.getpid()}/fd"
    root = _BUILD_AT
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID, "size=1m,mode=755")
    for folder, source in sources.items():
        _bind(f"{proc_now}/{source}", root + folder)
        kernel.set_mount_attributes(root + folder, kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID, recursive=True)
    for folder, target in links.items():
        os.symlink(target, root + folder)
    os.makedirs(f"{root}/dev", exist_ok=True)
    for name, source in devices.items():
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY))
        kernel.mount(f"{proc_now}/{source}", f"{root}/dev/{name}", None, kernel.MS_BIND)
    os.makedirs(root + SCRATCH)
    os.symlink(SCRATCH, f"{root}/dev/shm")
    if not os.path.exists(f"{root}/tmp"):
        os.symlink(SCRATCH, f"{root}/tmp")
    _bind(f"{proc_now}/{proc}", f"{root}/proc")
    for source in (*sources.values(), *devices.values(), proc):
        os.close(source)
    kernel.set_mount_attributes(root, kernel.MOUNT_ATTR_RDONLY, recursive=False)
    kernel.pivot_to(root)


def _bind(source: str, target: str) -> None:
    os.makedirs(target, exist_ok=True)
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)


def _without_nested(folders: Sequence[str]) -> list[str]:
    """The folders that exist, without those that lie in another of them."""
    present = sorted({os.path.abspath(folder) for folder in folders if os.path.isdir(folder)})
    kept: list[str] = []
    for folder in present:
        if not any(folder.startswith(f"{other}/") for other in kept):
            kept.append(folder)
    return kept


def _fork_first_process(fds_of_server: Sequence[int]) -> None:
    """The new pid namespace begins with the next child, so the one who entered it stays behind and waits."""
    child = os.fork()
    if child == 0:
        kernel.die_with_parent(signal.SIGKILL)
        return
    for fd in fds_of_server:
        os.close(fd)

    def end_it(*_: object) -> None:
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_it)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _own_proc() -> int:
    """A /proc of this pid namespace, for the fork server alone: calls see an empty, read-only folder in its place."""
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    kernel.mount("tmpfs", "/proc", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=4k,nr_inodes=1,mode=555")
    kernel.set_mount_attributes("/proc", kernel.MOUNT_ATTR_RDONLY, recursive=False)
    return proc
