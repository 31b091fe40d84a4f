"""Landlock: what a call may do with files, TCP and other processes, whatever it can name. Standard library only; Linux 5.13.

    files      to read and execute beneath some folders, to change beneath its own
    TCP        no port to bind or connect to (Linux 6.7)
    processes  no abstract socket of, and no signal to, what the call did not start itself (Linux 6.12)

Rules hold for whoever takes them on and for all that it starts, and nothing lifts them. They name files and not paths:
what is mounted later over a folder is not beneath it, but beneath that folder's parent.
"""
# pathlib would be mapped into every forked process.
# ruff: noqa: PTH110

import ctypes
import os
import struct
from collections.abc import Iterable

from sandbox.inside import kernel

_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446  # x86-64 and arm64
_ASK_VERSION, _PATH_BENEATH = 1, 1
_DO_NOT_LOG = 1  # what a call tries in vain is nobody's audit log; Linux 6.15

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_CHAR, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 6, 1 << 7, 1 << 8
_MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYM = 1 << 9, 1 << 10, 1 << 11, 1 << 12
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ALL = (1 << 13) - 1
_SINCE = {2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEV}  # by the version of the interface
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_DEVICE = _READ_FILE | _WRITE_FILE | _TRUNCATE
_OWN = _ALL & ~(_MAKE_CHAR | _MAKE_BLOCK) | _REFER | _TRUNCATE
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1


def version() -> int:
    """Of the interface that this kernel has. Raises OSError where it has none, or has it switched off."""
    found = kernel.LIBC.syscall(_SYS_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    return kernel.checked(found, "landlock_create_ruleset")


class Landlock:
    """The rules of a fork server's calls. `readable` folders and `devices` that do not exist are left out."""

    def __init__(self, abi: int, readable: Iterable[str], devices: Iterable[str]) -> None:
        self.abi = abi
        self._handled = _ALL
        for since, right in _SINCE.items():
            self._handled |= right if abi >= since else 0
        self._attributes = struct.pack(
            "<QQQ",
            self._handled,
            _BIND_TCP | _CONNECT_TCP if abi >= 4 else 0,
            _ABSTRACT_SOCKETS | _SIGNALS if abi >= 6 else 0,
        )[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
        self._flags = _DO_NOT_LOG if abi >= 7 else 0
        rules = [(path, _READ) for path in readable] + [(path, _DEVICE) for path in devices]
        self._fixed = [(os.open(path, os.O_PATH), rights) for path, rights in rules if os.path.exists(path)]

    def ruleset(self, own_folder: str) -> int:
        """A descriptor of rules that let a process change what is beneath `own_folder`. Raises OSError."""
        made = kernel.LIBC.syscall(_SYS_CREATE_RULESET, self._attributes, ctypes.c_size_t(len(self._attributes)), 0)
        ruleset = kernel.checked(made, "landlock_create_ruleset")
        own = os.open(own_folder, os.O_PATH)
        try:
            for fd, rights in (*self._fixed, (own, _OWN)):
                beneath = struct.pack("<Qi", rights & self._handled, fd)
                kernel.checked(
                    kernel.LIBC.syscall(_SYS_ADD_RULE, ruleset, _PATH_BENEATH, beneath, 0), "landlock_add_rule"
                )
        finally:
            os.close(own)
        return ruleset

    def take_on(self, ruleset: int) -> None:
        """For this process, for good. Needs no_new_privs. Raises OSError."""
        kernel.checked(kernel.LIBC.syscall(_SYS_RESTRICT_SELF, ruleset, self._flags), "landlock_restrict_self")
