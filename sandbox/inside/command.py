"""How the interpreter of a fork server or grader is started. Standard library only."""

from sandbox.inside.settings import Settings

# `random` would seed itself anew in each forked process, which costs as much as a small call; each call is seeded anyway.
_BOOT = """
import os, sys
hook, os.register_at_fork = os.register_at_fork, lambda **_: None
import random
os.register_at_fork = hook
sys.path.insert(0, {root!r})
from {module} import main
main()
"""
ENVIRONMENT = {  # all that executed code can find there, but for the first
    "LD_BIND_NOW": "1",  # a function that is looked up on first use would be looked up by each call anew
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the order of a set of strings must not change between two processes
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def python_command(python: str, root: str, module: str, settings: Settings, fd: int) -> list[str]:
    """`root` is the folder in which `sandbox` lies, `fd` the socket to the executor."""
    boot = _BOOT.format(root=root, module=module)
    return [python, "-s", "-P", "-S", "-B", "-c", boot, settings.to_json(), str(fd)]
