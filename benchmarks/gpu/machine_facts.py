"""Collects facts of the machine: the GPU, the kernel, memory, namespaces, and the versions of packages."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.cuda import nccl

from benchmarks.gpu.result_file import Figures

_GIB = 1 << 30
_FOLDERS = {"shm": "/dev/shm", "tmp": "/tmp"}
_PROBES = {"unshare_pid": ("unshare", "-fp", "true"), "unshare_user": ("unshare", "-Ur", "true")}
_GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,clocks.sm", "--format=csv,noheader")
_PACKAGES = ("numpy", "triton", "transformers", "tokenizers", "safetensors", "msgspec", "structlog", "pyzmq", "typer")
_OPTIONAL = ("polars", "matplotlib", "aiodocker", "math_verify")
_PROBE_LIMIT_S = 20.0


def collect_facts() -> Figures:
    """Collect all facts. `gpu` is empty without a GPU that torch can use."""
    has_gpu = torch.cuda.is_available()
    facts: Figures = {
        "gpu": torch.cuda.get_device_name(0) if has_gpu else "",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda or ""),
        "nvidia_smi": _run(_GPU_QUERY),
        "python": platform.python_version(),
        "kernel": " ".join(platform.uname()[:4]),
        "user": str(os.getuid()),
        "cpus": float(len(os.sched_getaffinity(0))),
    }
    if has_gpu:
        facts["gpu_gib"] = torch.cuda.get_device_properties(0).total_memory / _GIB
        facts["nccl"] = ".".join(map(str, nccl.version()))
    for name, folder in _FOLDERS.items():
        if not Path(folder).is_dir():
            continue
        usage = shutil.disk_usage(folder)
        facts |= {f"{name}_gib": usage.total / _GIB, f"{name}_free_gib": usage.free / _GIB}
    facts |= {name: _run(command) or "works" for name, command in _PROBES.items()}
    facts |= {package: _find_version(package) for package in _PACKAGES}
    facts["c_compiler"] = shutil.which(os.environ.get("CC", "gcc")) or "absent: set learner.compile = false"
    facts["python_headers"] = str((Path(sysconfig.get_path("include")) / "Python.h").exists())
    absent = [name for name in _OPTIONAL if importlib.util.find_spec(name) is None]
    return facts | {"absent": ", ".join(absent)}


def _run(command: tuple[str, ...]) -> str:
    """Return the command's output, or the reason of its failure."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_LIMIT_S, check=False)
    except FileNotFoundError:
        return f"no {command[0]}"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"no answer after {_PROBE_LIMIT_S:g} s"
    return (done.stdout or done.stderr).strip() or (f"exit code {done.returncode}" if done.returncode else "")


def _find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def select_device() -> torch.device:
    """Return the first GPU, or the CPU of a machine without a GPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
