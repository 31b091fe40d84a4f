"""Landlock rules of a call for files, TCP and other processes. They need Linux 5.13.

    files      read and execute beneath some folders, write beneath the call's own folder
    TCP        no bind and no connect (Linux 6.7)
    processes  no abstract sockets of processes outside the call, and no signals to them (Linux 6.12)

Rules apply to the process that installs them and to its descendants, permanently. They refer to
files, not to paths: a later mount over a folder is beneath the folder's parent, not beneath the
folder.
"""
# pathlib would be mapped into every forked process.
# ruff: noqa: PTH110

import ctypes
import os
import struct
from collections.abc import Iterable

from asterism.sandbox.inside.isolation import syscalls

_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446  # x86-64 and arm64
_ASK_VERSION, _PATH_BENEATH = 1, 1
_DO_NOT_LOG = 1  # keeps denied accesses out of the audit log; Linux 6.15

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_CHAR, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 6, 1 << 7, 1 << 8
_MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYM = 1 << 9, 1 << 10, 1 << 11, 1 << 12
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ABI_1_RIGHTS = (1 << 13) - 1
_RIGHTS_SINCE_ABI = {2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEV}
_READ_RIGHTS = _EXECUTE | _READ_FILE | _READ_DIR
_DEVICE_RIGHTS = _READ_FILE | _WRITE_FILE | _TRUNCATE
_READ_ONLY_DEVICE = "/dev/zero"  # a writable mapping would be shared memory that no limit counts
_OWN_FOLDER_RIGHTS = _ABI_1_RIGHTS & ~(_MAKE_CHAR | _MAKE_BLOCK) | _REFER | _TRUNCATE
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1


def get_abi_version() -> int:
    """Return the kernel's Landlock version. Raises OSError if Landlock is missing or disabled."""
    found = syscalls.LIBC.syscall(_SYS_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    return syscalls.check_result(found, "landlock_create_ruleset")


class LandlockRules:
    """The rules of a fork server's calls. Missing `readable` folders and `devices` are skipped."""

    def __init__(self, abi: int, readable: Iterable[str], devices: Iterable[str]) -> None:
        self.abi = abi
        self._handled_rights = _ABI_1_RIGHTS
        for since, right in _RIGHTS_SINCE_ABI.items():
            self._handled_rights |= right if abi >= since else 0
        self._attributes = struct.pack(
            "<QQQ",
            self._handled_rights,
            _BIND_TCP | _CONNECT_TCP if abi >= 4 else 0,
            _ABSTRACT_SOCKETS | _SIGNALS if abi >= 6 else 0,
        )[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
        self._flags = _DO_NOT_LOG if abi >= 7 else 0
        rules = [(path, _READ_RIGHTS) for path in readable]
        rules += [(path, _READ_FILE if path == _READ_ONLY_DEVICE else _DEVICE_RIGHTS) for path in devices]
        self._fixed_rules = [(os.open(path, os.O_PATH), rights) for path, rights in rules if os.path.exists(path)]

    def create_ruleset(self, own_folder: str) -> int:
        """Return a descriptor of the rules, with write access beneath `own_folder`. Raises OSError."""
        own = os.open(own_folder, os.O_PATH)
        ruleset = -1
        try:
            made = syscalls.LIBC.syscall(
                _SYS_CREATE_RULESET, self._attributes, ctypes.c_size_t(len(self._attributes)), 0
            )
            ruleset = syscalls.check_result(made, "landlock_create_ruleset")
            for fd, rights in (*self._fixed_rules, (own, _OWN_FOLDER_RIGHTS)):
                beneath = struct.pack("<Qi", rights & self._handled_rights, fd)
                syscalls.check_result(
                    syscalls.LIBC.syscall(_SYS_ADD_RULE, ruleset, _PATH_BENEATH, beneath, 0), "landlock_add_rule"
                )
        except OSError:
            if ruleset >= 0:
                os.close(ruleset)
            raise
        finally:
            os.close(own)
        return ruleset

    def restrict_self(self, ruleset: int) -> None:
        """Apply the rules to this process permanently. Needs no_new_privs. Raises OSError."""
        syscalls.check_result(syscalls.LIBC.syscall(_SYS_RESTRICT_SELF, ruleset, self._flags), "landlock_restrict_self")
