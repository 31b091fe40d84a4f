"""`python -m asterism.bus.process.parent_death ARGV...`: execute ARGV; when its parent exits, the kernel kills it.

With this program, `kill -9` of the launcher leaves no process, whatever programs its children execute. The parent
passes its process id in the environment. The executed program does the same: the learner's ranks end with torchrun's
agent (if there are several), which ends with the launcher.
"""

import ctypes
import os
import signal
import sys

PARENT_PID_VARIABLE = "ASTERISM_PARENT"
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent, the process `parent`, exits."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent exited before the call above
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(os.environ[PARENT_PID_VARIABLE]))  # the setting stays in force after exec
    os.environ[PARENT_PID_VARIABLE] = str(os.getpid())
    os.execvp(sys.argv[1], sys.argv[1:])
