"""Restricts the system calls of executed code by classic BPF programs.

There are two filters. Every call inherits the fork server's filter. Each call adds a short one, which
refuses the system calls of its setup and checks arguments. Together they allow the same system calls
in containers and on this machine (asterism.sandbox.inside.isolation.allowed_syscalls). Refused calls
fail with EPERM, and calls that are newer than the list with ENOSYS, as on an older kernel. clone3 fails
with ENOSYS, so that libc uses clone: a filter can read the flags of clone.
"""

import ctypes
import errno
import fcntl
import mmap
import socket
import struct
from collections.abc import Iterable

from asterism.sandbox.inside.isolation import syscalls
from asterism.sandbox.inside.isolation.allowed_syscalls import CALL_SYSCALLS, SETUP_SYSCALLS

# Index of the target argument, index of the argument with the target's kind, first denied kind. Only target 0,
# the caller, is allowed. The denied kinds cover all processes of a user.
_ALLOWED_ON_SELF = {
    "prlimit64": (0,),
    "sched_setaffinity": (0,),
    "sched_setattr": (0,),
    "sched_setparam": (0,),
    "sched_setscheduler": (0,),
    "setpriority": (1, 0, 2),
    "ioprio_set": (1, 0, 3),
}
# Allowed: descriptors, owners, and byte-range locks of a process, which end with it. Refused: leases and
# notifications, which observe other processes; locks of an open file; larger pipes.
_F_DUPFD_CLOEXEC = 1030
_FCNTL_COMMANDS = (*range(18), _F_DUPFD_CLOEXEC, fcntl.F_GETPIPE_SZ)
# Options of a process for itself: signal at the parent's exit, dumps, capabilities, name, timer slack, subreaper, new
# privileges, huge pages, speculation, names of memory. Refused: core scheduling, which takes CPUs from others.
_PRCTL_OPTIONS = (*range(1, 5), 7, 8, 15, 16, 21, 23, 24, *range(27, 31), *range(36, 43), 47, 52, 53, 0x5356_4D41)
_CLONE3 = 435
_DATAGRAM_BIT = 2  # the common bit of SOCK_DGRAM and SOCK_RAW: such a socket can send to any name
_NAMESPACE_FLAGS = 0x7E02_0000  # all CLONE_NEW* that clone supports
_AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000  # the bit of x86-64's second calling convention

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF_0000, 0x0005_0000
_DENY = _ERRNO | errno.EPERM
_ASK_LISTENER = 0x7FC0_0000
_SECCOMP_SET_MODE_FILTER, _NEW_LISTENER = 1, 1 << 3


def _pack_instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _load_argument(index: int) -> bytes:
    """Load the lower half of an argument: the kernel ignores the upper half of the checked arguments."""
    return _pack_instruction(_LOAD, _FIRST_ARGUMENT_AT + 8 * index)


def _build_allow_list(values: Iterable[int], beyond: int) -> list[bytes]:
    """Build a program that allows a value in `values` and denies others. A value above all `values` gets `beyond`."""
    ranges: list[list[int]] = []
    for value in sorted(values):
        if ranges and value == ranges[-1][1] + 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    program: list[bytes] = []
    for first, last in ranges:
        program += [
            _pack_instruction(_JUMP_AT_LEAST, first, 1, 0),
            _pack_instruction(_RETURN, _DENY),
            _pack_instruction(_JUMP_AT_LEAST, last + 1, 1, 0),
            _pack_instruction(_RETURN, _ALLOW),
        ]
    return [*program, _pack_instruction(_RETURN, beyond)]


def _build_checks(name: str, *checks: bytes) -> list[bytes]:
    """Build the checks of one call. The call is allowed unless a check returns; the program skips other calls."""
    return [
        _pack_instruction(_JUMP_EQUAL, CALL_SYSCALLS[name], 0, len(checks) + 1),
        *checks,
        _pack_instruction(_RETURN, _ALLOW),
    ]


def _deny_bits(argument: int, bits: int) -> list[bytes]:
    return [
        _load_argument(argument),
        _pack_instruction(_JUMP_ANY_BIT, bits, 0, 1),
        _pack_instruction(_RETURN, _DENY),
    ]


def _build_self_checks() -> list[bytes]:
    program: list[bytes] = []
    for name, (target, *kind) in _ALLOWED_ON_SELF.items():
        checks = _deny_bits(target, 0xFFFF_FFFF)
        if kind:
            checks += [
                _load_argument(kind[0]),
                _pack_instruction(_JUMP_AT_LEAST, kind[1], 0, 1),
                _pack_instruction(_RETURN, _DENY),
            ]
        program += _build_checks(name, *checks)
    return program


def _build_server_program(on_lock_inquiry: int) -> bytes:
    lock_inquiry = [
        _load_argument(1),
        _pack_instruction(_JUMP_EQUAL, fcntl.F_GETLK, 0, 1),
        _pack_instruction(_RETURN, on_lock_inquiry),
    ]
    unix_pair = [
        _load_argument(0),
        _pack_instruction(_JUMP_EQUAL, socket.AF_UNIX, 1, 0),
        _pack_instruction(_RETURN, _DENY),
        *_deny_bits(1, _DATAGRAM_BIT),
    ]
    program = [
        _pack_instruction(_LOAD, _ARCH_AT),
        _pack_instruction(_JUMP_EQUAL, _AUDIT_ARCH[syscalls.MACHINE], 1, 0),
        _pack_instruction(_RETURN, _DENY),
        _pack_instruction(_LOAD, _NUMBER_AT),
        _pack_instruction(_JUMP_AT_LEAST, _X32_BIT, 0, 1),
        _pack_instruction(_RETURN, _DENY),
        _pack_instruction(_JUMP_EQUAL, _CLONE3, 0, 1),
        _pack_instruction(_RETURN, _ERRNO | errno.ENOSYS),
        *_build_checks("socketpair", *unix_pair),
        *_build_checks("fcntl", *lock_inquiry),
        *_build_allow_list({*CALL_SYSCALLS.values(), *SETUP_SYSCALLS.values()}, beyond=_ERRNO | errno.ENOSYS),
    ]
    return b"".join(program)


def _build_call_program() -> bytes:
    # Shared anonymous memory appears in no process's resident size, and outlives its writer.
    private_memory = [
        _load_argument(3),
        _pack_instruction(_JUMP_ANY_BIT, mmap.MAP_ANONYMOUS, 0, 2),
        _pack_instruction(_JUMP_ANY_BIT, mmap.MAP_SHARED, 0, 1),
        _pack_instruction(_RETURN, _DENY),
    ]
    program = [
        _pack_instruction(_LOAD, _NUMBER_AT),
        *_build_checks("mmap", *private_memory),
        *_build_checks("fcntl", _load_argument(1), *_build_allow_list(_FCNTL_COMMANDS, beyond=_DENY)),
        *_build_checks("prctl", _load_argument(0), *_build_allow_list(_PRCTL_OPTIONS, beyond=_DENY)),
        # unshare(CLONE_THREAD) has no effect; syscalls.is_single_threaded needs it.
        _pack_instruction(_JUMP_EQUAL, SETUP_SYSCALLS["unshare"], 0, 4),
        _load_argument(0),
        _pack_instruction(_JUMP_EQUAL, syscalls.CLONE_THREAD, 0, 1),
        _pack_instruction(_RETURN, _ALLOW),
        _pack_instruction(_LOAD, _NUMBER_AT),
        *_build_deny(SETUP_SYSCALLS.values()),
        *_build_self_checks(),
        *_build_checks("clone", *_deny_bits(0, _NAMESPACE_FLAGS)),
        _pack_instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _build_deny(numbers: Iterable[int]) -> list[bytes]:
    """Deny these calls; the call's number must be loaded."""
    program: list[bytes] = []
    for number in numbers:
        program += [_pack_instruction(_JUMP_EQUAL, number, 0, 1), _pack_instruction(_RETURN, _DENY)]
    return program


class _BpfProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


class SeccompFilter:
    """A filter that is built once, before the fork."""

    def __init__(self, instructions: bytes) -> None:
        self._program = _BpfProgram(len(instructions) // 8, instructions)

    def install(self, flags: int = 0) -> int:
        """Filter this thread and its descendants. Needs no_new_privs. Raises OSError."""
        done = syscalls.LIBC.syscall(
            SETUP_SYSCALLS["seccomp"], _SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(self._program)
        )
        return syscalls.check_result(done, "seccomp")


def install_server_filter(*, own_folders: bool) -> int | None:
    """Install the filter of the fork server. Raises OSError.

    If calls have folders of their own, return the descriptor that receives uses of F_GETLK. If a filter of the
    container already has such a descriptor, refuse F_GETLK and return None.
    """
    if not own_folders:
        SeccompFilter(_build_server_program(_ALLOW)).install()
        return None
    try:
        return SeccompFilter(_build_server_program(_ASK_LISTENER)).install(_NEW_LISTENER)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EINVAL):
            raise
    SeccompFilter(_build_server_program(_DENY)).install()
    return None


def build_call_filter() -> SeccompFilter:
    return SeccompFilter(_build_call_program())
