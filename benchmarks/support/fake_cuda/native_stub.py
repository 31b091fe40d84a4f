"""Builds the C++ part with g++, once per version of torch and of the source, and loads it before torch.

torch reads the registry of CUDA hooks only once. A library that is loaded later would have no effect.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

_SOURCE = Path(__file__).with_name("fake_cuda.cpp")
_CACHE = Path(__file__).parents[3] / "build" / "fake_cuda"
_COMPILER = "g++"


def load_stub() -> None:
    """Load the library. Raises RuntimeError if torch is already imported or if g++ is missing."""
    if "torch" in sys.modules:
        raise RuntimeError("fake CUDA must be loaded before torch: start a new process")
    torch_folder = _find_torch()
    for library in (torch_folder / "lib" / "libc10.so", torch_folder / "lib" / "libtorch_cpu.so", build_stub()):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def build_stub() -> Path:
    """Return the path of the library. The first build takes about 3 s. Several processes can build it at once."""
    digest = hashlib.sha256(version("torch").encode() + _SOURCE.read_bytes()).hexdigest()[:16]
    built = _CACHE / f"libfake_cuda_{digest}.so"
    if built.exists():
        return built
    if shutil.which(_COMPILER) is None:
        raise RuntimeError(f"{_COMPILER} is not on PATH; fake CUDA compiles {_SOURCE.name} with it: install g++")
    folder = _find_torch()
    _CACHE.mkdir(parents=True, exist_ok=True)
    unfinished = built.with_suffix(f".{os.getpid()}")
    includes = [f"-I{folder / 'include' / part}" for part in ("", "torch/csrc/api/include")]
    libraries = [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    options = ["-O1", "-shared", "-fPIC", "-std=c++20", *includes]
    command = [_COMPILER, *options, str(_SOURCE), *libraries, "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{_SOURCE.name} does not compile against torch {version('torch')}:\n{done.stderr}")
    unfinished.replace(built)
    return built


def _find_torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    return Path(spec.origin).parent
