"""Whether this kernel lets an unprivileged process make namespaces: tried in a child process, not guessed from settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# Runs in a process of its own, which is single-threaded, as unshare(CLONE_NEWUSER) demands. Some kernels allow the
# namespace and then refuse what is done inside it, so the child also maps its user and mounts a file system.
_CHILD = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
USER, PID, MOUNT, NETWORK, IPC = 0x10000000, 0x20000000, 0x00020000, 0x40000000, 0x08000000
def attempt(step, result):
    if result != 0:
        print(f"{step}: {os.strerror(ctypes.get_errno())}")
        raise SystemExit
uid = os.getuid()
attempt("unshare", libc.unshare(USER | PID | MOUNT | NETWORK | IPC))
try:
    with open("/proc/self/uid_map", "w") as uid_map:
        uid_map.write(f"0 {uid} 1")
except OSError as error:
    print(f"uid_map: {error.strerror}")
    raise SystemExit
attempt("mount", libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None))
attempt("mount", libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None))
print("ok")
"""

# setting, its value that forbids, its value that allows
_SETTINGS = (
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("user.max_user_namespaces", "0", "15000"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
)


class NamespaceTrial(NamedTuple):
    refused: str  # the step that the kernel refused and its reason; empty where all was allowed
    remedy: str


def try_namespaces() -> NamespaceTrial:
    """User, pid, mount, network and ipc namespaces, all at once."""
    child = subprocess.run(
        [sys.executable, "-I", "-c", _CHILD], capture_output=True, text=True, timeout=10, check=False
    )
    answer = child.stdout.strip() or child.stderr.strip().rpartition("\n")[2] or f"exit code {child.returncode}"
    return NamespaceTrial("", "") if answer == "ok" else NamespaceTrial(answer, namespace_remedy(Path("/proc/sys")))


def namespace_remedy(sysctls: Path) -> str:
    """The setting below `sysctls` that forbids namespaces, turned round; a container's profile if none does."""
    for setting, forbids, allows in _SETTINGS:
        file = sysctls / setting.replace(".", "/")
        if file.exists() and file.read_text().strip() == forbids:
            return f"Run `sudo sysctl -w {setting}={allows}`."
    return "In a container, start it with a seccomp profile that allows unshare and mount."
