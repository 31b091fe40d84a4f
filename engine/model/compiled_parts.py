"""Parts of decoder layers, compiled by torch.compile: products with fused norms, rotations and SwiGLU.

All layers of a model share the compiled code, for any number of tokens. torch compiles a part separately for training, for
passes without gradients, and for frozen weights. It stores the code in TORCHINDUCTOR_CACHE_DIR, by default
/tmp/torchinductor_USER, so that a restarted learner loads it. After 8 compilations of a part, torch logs a warning with
the cause of the last one and computes eagerly. The check for a compiler does not import torch.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from configs.errors import UnusableInput

if TYPE_CHECKING:
    from torch import Tensor, nn

Result = TypeVar("Result")


def run_eagerly(part: Callable[..., Result], layer: nn.Module, x_BTE: Tensor, *inputs: Tensor) -> Result:
    return part(layer, x_BTE, *inputs)


def run_compiled(part: Callable[..., Result], layer: nn.Module, x_BTE: Tensor, *inputs: Tensor) -> Result:
    """torch compiles sizes of 1 separately: the only token of an empty micro batch is not worth it."""
    compute = part if x_BTE.shape[1] == 1 else _compile(part)
    return compute(layer, x_BTE, *inputs)


@cache
def _compile(part: Callable[..., Result]) -> Callable[..., Result]:
    import torch

    return torch.compile(part, dynamic=True, fullgraph=True)


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
