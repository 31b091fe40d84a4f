"""`python -m bus.death ARGV...`: become ARGV, and die with the process that started this one.

What makes `kill -9` of the launcher leave no process behind, whatever program the child is. The starter passes its
process id in the environment, and so does the program that this one becomes: the learner's ranks die with torchrun's
agent, which dies with the launcher.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "ASTERISM_PARENT"
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as process `parent`, which started it, is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(os.environ[PARENT]))  # the setting outlives exec
    os.environ[PARENT] = str(os.getpid())
    os.execvp(sys.argv[1], sys.argv[1:])
