"""What a process does right before a call's code: CPU limit, standard input, seeds. Standard library only."""

import math
import os
import random
import resource
import sys
from typing import Any

from sandbox.inside.calls import Call
from sandbox.inside.settings import Settings

# Of CPU time that one process of a session has for all its cells, in time limits: the kernel's limit cannot be raised for
# a cell. It ends what computes on between cells. A worker that comes to it makes place for its checkpoint, which counts anew.
_SESSION_CPU_CELLS = 64


def begin(call: Call, settings: Settings) -> None:
    cpu_s = math.ceil(settings.time_limit_s) + 1
    if call.is_cell:
        cpu_s *= _SESSION_CPU_CELLS
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    if call.stdin:
        fd = _unnamed_file()
        os.write(fd, call.stdin)
        os.lseek(fd, 0, os.SEEK_SET)
        os.dup2(fd, 0)
        os.close(fd)
    _seed(call.seed)


def _unnamed_file() -> int:
    """A file in the call's folder that nothing can open. In memory of its own it would not count as the folder's."""
    try:
        return os.open(".", os.O_TMPFILE | os.O_RDWR)
    except OSError:  # not every file system can
        fd = os.open(".stdin", os.O_CREAT | os.O_EXCL | os.O_RDWR)
        os.remove(".stdin")  # noqa: PTH107
        return fd


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    sympy: Any = sys.modules.get("sympy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFF_FFFF)
        numpy.random.bit_generator.randbits = random.Random(seed).getrandbits  # what a default_rng() is seeded with
    if sympy is not None:
        sympy.core.random.seed(seed)
