"""The command line, environment and module path of a fork server or grader."""

import sys
import sysconfig
from pathlib import Path

from asterism.sandbox.inside.wire.server_settings import ServerSettings

# `random` would reseed itself after each fork, which costs as much as a small call. Calls seed it anyway.
_BOOT_SCRIPT = """
import os, sys
hook, os.register_at_fork = os.register_at_fork, lambda **_: None
import random
os.register_at_fork = hook
sys.path.insert(0, {root!r})
from {module} import main
main()
"""
ENVIRONMENT = {  # environment of executed code, except LD_BIND_NOW
    "LD_BIND_NOW": "1",  # lazy binding would repeat the look-up in each call
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # a set of strings has the same order in every process
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def build_python_command(python: str, root: str, module: str, settings: ServerSettings, fd: int) -> list[str]:
    """Build the command. `root` is the folder that contains `asterism`, `fd` the socket to the executor."""
    boot = _BOOT_SCRIPT.format(root=root, module=module)
    return [python, "-s", "-P", "-S", "-B", "-c", boot, settings.to_json(), str(fd)]


def list_import_folders() -> tuple[str, ...]:
    """Return sys.path of executed code: standard library and installed packages."""
    paths = sysconfig.get_paths()
    return (
        *list_standard_folders(),
        *(path for path in dict.fromkeys((paths["purelib"], paths["platlib"])) if Path(path).exists()),
    )


def list_standard_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    zipped = f"{sys.base_prefix}/lib/python{sys.version_info[0]}{sys.version_info[1]}.zip"
    dynamic = next((path for path in sys.path if path.endswith("lib-dynload")), "")
    candidates = (zipped, paths["stdlib"], f"{paths['platstdlib']}/lib-dynload", dynamic)
    found = [str(Path(path)) for path in candidates if path and Path(path).exists()]
    return tuple(dict.fromkeys(found))
