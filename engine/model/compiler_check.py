"""Looks for the compiler that torch.compile needs. Imports no torch, since the launcher checks configurations with it."""

import os
import shutil
import sysconfig
from pathlib import Path

from configs.errors import UnusableInput


def find_compiler(device: str) -> str:
    """The path of the compiler that torch needs. Raises UnusableInput without one, or without the headers of Python.

    On a CPU, torch compiles its C++ code with $CXX, by default g++. For a GPU, Triton compiles the C code that starts its
    kernels, with $CC, gcc or clang.
    """
    variable, commands, package = ("CC", ("gcc", "clang"), "gcc") if device == "cuda" else ("CXX", ("g++",), "g++")
    chosen = os.environ.get(variable)
    commands = (chosen,) if chosen else commands
    found = next((path for command in commands if (path := shutil.which(command))), None)
    if found is None:
        raise UnusableInput(
            f"no compiler ({' or '.join(commands)}) on PATH; install {package}, or set {variable}, or set "
            "learner.compile = false"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise UnusableInput(f"{header} is absent; install python3-dev, or set learner.compile = false")
    return found
