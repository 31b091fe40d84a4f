"""The system calls that Python has no function for. Standard library only; Linux."""

import ctypes
import errno
import os
import signal
import sys

CLONE_THREAD = 0x0001_0000
CLONE_NEWNS = 0x0002_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x0020_0000, 0x0100_0000

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_PR_GET_TID_ADDRESS = 40
_CAPABILITY_VERSION_3 = 0x2008_0522

# Numbers that x86-64 and arm64 share (all calls since Linux 5.1), and pivot_root, which they do not.
_SYS_CLOSE_RANGE, _SYS_MOUNT_SETATTR = 436, 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}

MACHINE = os.uname().machine
LIBC = ctypes.CDLL(None, use_errno=True)
_syscall = LIBC.syscall
_syscall.restype = ctypes.c_long


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    checked(LIBC.unshare(flags), "unshare")


def is_single_threaded() -> bool:
    """Threads that Python does not know among them. Where a filter forbids to ask the kernel, Python's are counted."""
    if LIBC.unshare(CLONE_THREAD) == 0:  # changes nothing where there is nothing to leave
        return True
    return ctypes.get_errno() == errno.EPERM and len(sys._current_frames()) == 1  # pyright: ignore[reportPrivateUsage]


_own = ctypes.PyDLL(None, use_errno=True)  # calls keep Python's lock, which a copy could not take
_tid_address = ctypes.c_void_p()  # where libc keeps the main thread's id
LIBC.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(_tid_address), 0, 0, 0)
_COPY_FLAGS = _CLONE_PARENT | signal.SIGCHLD | (_CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID if _tid_address else 0)
# The child's thread id goes to the fourth argument, or to the fifth; the other is of no use here.
_COPY = (_SYS_CLONE[MACHINE], ctypes.c_long(_COPY_FLAGS), None, None, _tid_address, _tid_address)


def fork_sibling() -> int:
    """As os.fork(), but the child is a child of this process's parent. For a process with one thread."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _own.syscall(*_COPY)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return checked(pid, "clone")


def copy_for_parent(flags: int) -> int:
    """As `fork_sibling`, in the namespaces that `flags` ask for. Nothing is run that is registered for a fork: for a process
    with one thread, which holds no locks, and whose copies are to be as it is.
    """
    number, _, *others = _COPY
    return checked(_own.syscall(number, ctypes.c_long(_COPY_FLAGS | flags), *others), "clone")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    kind_bytes = kind.encode() if kind else None
    option_bytes = options.encode() if options else None
    checked(LIBC.mount(source.encode(), target.encode(), kind_bytes, flags, option_bytes), f"mount {target}")


def set_mount_attributes(target: str, attributes: int, recursive: bool) -> None:
    """Adds to what is set: flags that a user namespace may not clear stay as they are. Linux 5.12."""
    values = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    done = _syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), flags, values, ctypes.sizeof(values))
    checked(done, f"mount_setattr {target}")


def pivot_to(folder: str) -> None:
    """Make `folder`, a mount point, the root; nothing of the old root stays reachable."""
    os.chdir(folder)
    checked(_syscall(_SYS_PIVOT_ROOT[MACHINE], b".", b"."), "pivot_root")
    checked(LIBC.umount2(b".", MNT_DETACH), "umount the old root")
    os.chdir("/")


def close_all_from(fd: int) -> None:
    if _syscall(_SYS_CLOSE_RANGE, fd, 0xFFFF_FFFF, 0) < 0:
        os.closerange(fd, os.sysconf("SC_OPEN_MAX"))


_capability_header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
_no_capabilities = (ctypes.c_uint32 * 6)()


def drop_capabilities() -> None:
    checked(_syscall(_SYS_CAPSET[MACHINE], _capability_header, _no_capabilities), "capset")


def die_with_parent(signal: int) -> None:
    """The signal comes when the thread that forked this process ends."""
    checked(LIBC.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0), "PR_SET_PDEATHSIG")


def allow_own_proc() -> None:
    """After a change of user, /proc/self belongs to root until the process is dumpable again."""
    checked(LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "PR_SET_DUMPABLE")


def adopt_orphans() -> None:
    checked(LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")


def no_new_privileges() -> None:
    checked(LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
