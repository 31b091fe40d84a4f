"""Wrappers of Linux system calls that Python does not offer."""

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

# x86-64 and arm64 have the same numbers for system calls that were added since Linux 5.1.
_SYS_CLOSE_RANGE, _SYS_MOUNT_SETATTR = 436, 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}

MACHINE = os.uname().machine
LIBC = ctypes.CDLL(None, use_errno=True)
_syscall = LIBC.syscall
_syscall.restype = ctypes.c_long


def check_result(result: int, operation: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{operation}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    check_result(LIBC.unshare(flags), "unshare")


def is_single_threaded() -> bool:
    """Return whether no other thread exists. Under a filter, the check may cover only Python's threads."""
    if LIBC.unshare(CLONE_THREAD) == 0:  # succeeds, without effect, only in a single-threaded process
        return True
    return ctypes.get_errno() == errno.EPERM and len(sys._current_frames()) == 1  # pyright: ignore[reportPrivateUsage]


_libc_holding_gil = ctypes.PyDLL(None, use_errno=True)  # a child could not reacquire the GIL
_tid_address = ctypes.c_void_p()  # address of libc's copy of the main thread's id
LIBC.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(_tid_address), 0, 0, 0)
_CLONE_FLAGS = _CLONE_PARENT | signal.SIGCHLD | (_CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID if _tid_address else 0)
# The address for the child's thread id is the fourth or fifth argument, depending on the machine.
_CLONE_ARGUMENTS = (_SYS_CLONE[MACHINE], ctypes.c_long(_CLONE_FLAGS), None, None, _tid_address, _tid_address)


def fork_sibling() -> int:
    """Fork like os.fork(), but as a child of this process's parent. Only single-threaded processes may call it."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _libc_holding_gil.syscall(*_CLONE_ARGUMENTS)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return check_result(pid, "clone")


def clone_for_parent(flags: int) -> int:
    """Fork like `fork_sibling`, with further clone `flags` and without Python's fork hooks.

    Only single-threaded processes that hold no locks may call it.
    """
    number, _, *others = _CLONE_ARGUMENTS
    return check_result(_libc_holding_gil.syscall(number, ctypes.c_long(_CLONE_FLAGS | flags), *others), "clone")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    kind_bytes = kind.encode() if kind else None
    option_bytes = options.encode() if options else None
    check_result(LIBC.mount(source.encode(), target.encode(), kind_bytes, flags, option_bytes), f"mount {target}")


def set_mount_attributes(target: str, attributes: int, recursive: bool) -> None:
    """Add attributes and keep the present ones: a user namespace cannot clear every attribute. Needs Linux 5.12."""
    values = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    done = _syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), flags, values, ctypes.sizeof(values))
    check_result(done, f"mount_setattr {target}")


def pivot_to(folder: str) -> None:
    """Make `folder`, a mount point, the root; the old root becomes unreachable."""
    os.chdir(folder)
    check_result(_syscall(_SYS_PIVOT_ROOT[MACHINE], b".", b"."), "pivot_root")
    check_result(LIBC.umount2(b".", MNT_DETACH), "umount the old root")
    os.chdir("/")


def close_all_from(fd: int) -> None:
    if _syscall(_SYS_CLOSE_RANGE, fd, 0xFFFF_FFFF, 0) < 0:
        os.closerange(fd, os.sysconf("SC_OPEN_MAX"))


_capability_header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
_no_capabilities = (ctypes.c_uint32 * 6)()


def drop_capabilities() -> None:
    check_result(_syscall(_SYS_CAPSET[MACHINE], _capability_header, _no_capabilities), "capset")


def die_with_parent(signal: int) -> None:
    """Let the kernel send the signal to this process when the thread that forked it ends."""
    check_result(LIBC.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0), "PR_SET_PDEATHSIG")


def make_dumpable() -> None:
    """Give /proc/self back to this user: after a change of user it belongs to root."""
    check_result(LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "PR_SET_DUMPABLE")


def become_subreaper() -> None:
    check_result(LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")


def set_no_new_privileges() -> None:
    check_result(LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
