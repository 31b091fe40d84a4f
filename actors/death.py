"""`python -m actors.death PARENT ARGV...`: become ARGV, and die with process PARENT.

What makes `kill -9` of the launcher leave no process behind, whatever program the child is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as process `parent`, which started it, is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))  # the setting outlives exec
    os.execvp(sys.argv[2], sys.argv[2:])
