"""Sets the CPU limit, standard input and random seeds before a call's code runs."""

import math
import os
import random
import resource
import sys
from typing import Any

from asterism.sandbox.inside.wire.call_wire import CallRequest
from asterism.sandbox.inside.wire.server_settings import ServerSettings

# CPU time of a notebook process over all cells, in multiples of the time limit. The kernel's limit cannot be raised per
# cell. It stops threads that compute between cells. At this limit, the notebook rolls back to its
# checkpoint, a new process with its own count.
_NOTEBOOK_CPU_CELLS = 64


def set_up_call(call: CallRequest, settings: ServerSettings) -> None:
    cpu_s = math.ceil(settings.time_limit_s) + 1
    if call.is_cell:
        cpu_s *= _NOTEBOOK_CPU_CELLS
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    if call.stdin:
        fd = _open_unnamed_file()
        os.write(fd, call.stdin)
        os.lseek(fd, 0, os.SEEK_SET)
        os.dup2(fd, 0)
        os.close(fd)
    _seed_generators(call.seed)


def _open_unnamed_file() -> int:
    """Open an unlinked file in the call's folder: a memfd would bypass the folder's size limit."""
    try:
        return os.open(".", os.O_TMPFILE | os.O_RDWR)
    except OSError:  # not supported by every file system
        fd = os.open(".stdin", os.O_CREAT | os.O_EXCL | os.O_RDWR)
        os.remove(".stdin")  # noqa: PTH107
        return fd


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    sympy: Any = sys.modules.get("sympy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFF_FFFF)
        numpy.random.bit_generator.randbits = random.Random(seed).getrandbits  # seeds default_rng()
    if sympy is not None:
        sympy.core.random.seed(seed)
