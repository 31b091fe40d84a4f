"""Denies system calls to executed code by classic BPF programs.

There are two filters: the fork server installs one on itself, which every call inherits, and each
call installs a short one for the calls that the fork server itself needs (namespaces and mounts).
Denied calls fail with EPERM. clone3 fails with ENOSYS, so that libc falls back to clone: a filter
can read its flags.
"""

import ctypes
import errno
import struct

from sandbox.inside.isolation import syscalls

# name: (x86-64, arm64); None where the machine has no such call
_SYSCALL_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    # further uses of a socket pair: bind a name, connect to one, hold kernel memory
    "bind": (49, 200),
    "connect": (42, 203),
    "listen": (50, 201),
    "setsockopt": (54, 208),
    "clone": (56, 220),
    "semget": (64, 190),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "syslog": (103, 116),
    # memory that no limit of the call covers
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
    "io_setup": (206, 0),
    # other processes' memory, and memory placement
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # the machine's disks, clock, names and accounts
    "sync": (162, 81),
    "syncfs": (306, 267),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "clock_settime": (227, 112),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "fanotify_mark": (301, 263),
    "statmount": (457, 457),
    "listmount": (458, 458),
    # legacy calls
    "ioperm": (173, None),
    "iopl": (172, None),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    "nfsservctl": (180, 42),
    "uselib": (134, None),
    "lookup_dcookie": (212, 18),
    "_sysctl": (156, None),
    "sysfs": (139, None),
    "ustat": (136, None),
    # limits, CPUs and priorities: allowed only on the calling process
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fspick": (433, 433),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
}
_DENIED_TO_CALLS_ONLY = (
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "open_tree"),
    *("move_mount", "fsopen", "fsconfig", "fspick", "fsmount", "mount_setattr"),
)
# (index of the target argument, of its kind, first denied kind). Only target 0 is allowed: the caller.
# The denied kinds cover all processes of a user.
_ALLOWED_ON_SELF = {
    "prlimit64": (0,),
    "sched_setaffinity": (0,),
    "sched_setattr": (0,),
    "sched_setparam": (0,),
    "sched_setscheduler": (0,),
    "setpriority": (1, 0, 2),
    "ioprio_set": (1, 0, 3),
}
_BY_ARGUMENT = ("socketpair", "clone", *_ALLOWED_ON_SELF)
_CLONE3 = 435
_DATAGRAM_BIT = 2  # the common bit of SOCK_DGRAM and SOCK_RAW: such a socket can send to any name
_NAMESPACE_FLAGS = 0x7E02_0000  # all CLONE_NEW* that clone supports
_AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000  # the bit of x86-64's second calling convention

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24
_ALLOW, _ERRNO = 0x7FFF_0000, 0x0005_0000
_DENY = _ERRNO | errno.EPERM
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_MODE_FILTER = 1


def _pack_instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _get_syscall_number(name: str) -> int | None:
    return _SYSCALL_NUMBERS[name][0 if syscalls.MACHINE == "x86_64" else 1]


def _build_deny(names: tuple[str, ...]) -> list[bytes]:
    """Denies `names`. The call's number is loaded before and after."""
    numbers = [number for name in names if (number := _get_syscall_number(name)) is not None]
    program: list[bytes] = []
    for number in numbers:
        program += [_pack_instruction(_JUMP_EQUAL, number, 0, 1), _pack_instruction(_RETURN, _DENY)]
    return program


def _build_deny_for_others() -> list[bytes]:
    """Handles the calls in `_ALLOWED_ON_SELF`. The call's number is loaded before and after."""
    program: list[bytes] = []
    for name, (target, *kind) in _ALLOWED_ON_SELF.items():
        number = _get_syscall_number(name)
        assert number is not None
        checks = [
            _pack_instruction(_LOAD, _FIRST_ARGUMENT_AT + 8 * target),
            _pack_instruction(_JUMP_ANY_BIT, 0xFFFF_FFFF, 0, 1),
            _pack_instruction(_RETURN, _DENY),
        ]
        if kind:
            checks += [
                _pack_instruction(_LOAD, _FIRST_ARGUMENT_AT + 8 * kind[0]),
                _pack_instruction(_JUMP_AT_LEAST, kind[1], 0, 1),
                _pack_instruction(_RETURN, _DENY),
            ]
        program += [
            _pack_instruction(_JUMP_EQUAL, number, 0, len(checks) + 1),
            *checks,
            _pack_instruction(_RETURN, _ALLOW),
        ]
    return program


def _build_server_program() -> bytes:
    names = tuple(name for name in _SYSCALL_NUMBERS if name not in (*_DENIED_TO_CALLS_ONLY, *_BY_ARGUMENT))
    socketpair = _get_syscall_number("socketpair")
    assert socketpair is not None
    program = [
        _pack_instruction(_LOAD, _ARCH_AT),
        _pack_instruction(_JUMP_EQUAL, _AUDIT_ARCH[syscalls.MACHINE], 1, 0),
        _pack_instruction(_RETURN, _DENY),
        _pack_instruction(_LOAD, _NUMBER_AT),
        _pack_instruction(_JUMP_AT_LEAST, _X32_BIT, 0, 1),
        _pack_instruction(_RETURN, _DENY),
        _pack_instruction(_JUMP_EQUAL, _CLONE3, 0, 1),
        _pack_instruction(_RETURN, _ERRNO | errno.ENOSYS),
        *_build_deny(names),
        _pack_instruction(_JUMP_EQUAL, socketpair, 0, 3),
        _pack_instruction(_LOAD, _SECOND_ARGUMENT_AT),
        _pack_instruction(_JUMP_ANY_BIT, _DATAGRAM_BIT, 0, 1),
        _pack_instruction(_RETURN, _DENY),
        _pack_instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _build_call_program() -> bytes:
    clone, unshare = _get_syscall_number("clone"), _get_syscall_number("unshare")
    assert clone is not None
    assert unshare is not None
    program = [
        _pack_instruction(_LOAD, _NUMBER_AT),
        # unshare(CLONE_THREAD) has no effect; syscalls.is_single_threaded needs it.
        _pack_instruction(_JUMP_EQUAL, unshare, 0, 4),
        _pack_instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _pack_instruction(_JUMP_EQUAL, syscalls.CLONE_THREAD, 0, 1),
        _pack_instruction(_RETURN, _ALLOW),
        _pack_instruction(_LOAD, _NUMBER_AT),
        *_build_deny(_DENIED_TO_CALLS_ONLY),
        *_build_deny_for_others(),
        _pack_instruction(_JUMP_EQUAL, clone, 0, 3),
        _pack_instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _pack_instruction(_JUMP_ANY_BIT, _NAMESPACE_FLAGS, 0, 1),
        _pack_instruction(_RETURN, _DENY),
        _pack_instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


class _BpfProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


class SeccompFilter:
    """A program that is built once, before the fork."""

    def __init__(self, instructions: bytes) -> None:
        self._program = _BpfProgram(len(instructions) // 8, instructions)

    def install(self) -> None:
        """Filters this thread and its descendants. Needs no_new_privs. Raises OSError."""
        done = syscalls.LIBC.syscall(
            _SYS_SECCOMP[syscalls.MACHINE], _SECCOMP_SET_MODE_FILTER, 0, ctypes.byref(self._program)
        )
        syscalls.check_result(done, "seccomp")


def build_server_filter() -> SeccompFilter:
    return SeccompFilter(_build_server_program())


def build_call_filter() -> SeccompFilter:
    return SeccompFilter(_build_call_program())
