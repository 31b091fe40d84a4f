"""`asterism doctor`: what this machine has and lacks for a run, with the remedy for each lack.

A check looks, it changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from actors.finding import GIB, Finding, Status, find
from configs.schema import Run
from sandbox.contract import Isolation
from sandbox.docker_probe import DockerTrial, try_docker
from sandbox.doctor import probe_isolation
from sandbox.isolation import in_words

_REINSTALL = "Run `make setup`, which installs the pinned packages into .venv."
_CPU_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "amx_bf16": "AMX BF16",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "BF16",
}


def examine(folder: Path = Path(), run: Run | None = None) -> list[Finding]:
    """Everything that a run in `folder` depends on, and what this very one needs. Never raises; takes about as long as
    importing torch, and once more where the run's servers are to have GPUs."""
    checks: dict[str, Callable[[], Finding]] = {
        "Python": lambda: check_python(sys.version_info[:3]),
        "torch": check_torch,
        "uvloop": check_uvloop,
        "CPU": lambda: check_cpu(Path("/proc/cpuinfo")),
        "cores": lambda: check_cores(num_cores()),
        "memory": lambda: check_memory(memory_bytes()),
        "GPU": check_gpu,
        "Docker engine": lambda: check_docker(try_docker(os.environ)),
        "sandbox": lambda: check_isolation(probe_isolation()),
        "shared memory": lambda: check_shared_memory(Path("/dev/shm")),
        "open files": lambda: check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        "disk": lambda: check_disk(folder),
    }
    findings = [find(name, check) for name, check in checks.items()]
    if any(finding.name == "torch" and finding.status == "missing" for finding in findings):
        return findings
    from actors.doctor_run import find_for_run, find_sglang  # all of it needs torch

    return [*findings, *(find_for_run(run) if run else [find_sglang(folder)])]


# ---------------------------------------------------------------- software


def check_python(version: tuple[int, ...]) -> Finding:
    detail = ".".join(map(str, version))
    if version < (3, 11):
        return Finding("Python", "missing", detail, "Install Python 3.11 or newer and run `make setup` with it.")
    return Finding("Python", "ok", f"{detail} ({platform.python_implementation()}, {platform.machine()})")


def check_torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", "missing", str(error), _REINSTALL)
    threads = torch.get_num_threads()
    return Finding(
        "torch", "ok", f"{torch.__version__}, {threads} {'thread' if threads == 1 else 'threads'} by default"
    )


def check_uvloop() -> Finding:
    try:
        return Finding("uvloop", "ok", importlib.metadata.version("uvloop"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("uvloop", "missing", "not installed", _REINSTALL)


# ---------------------------------------------------------------- processor, memory, GPU


def check_cpu(cpuinfo: Path) -> Finding:
    lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    values = {key.strip(): value.strip() for key, _, value in lines}
    flags = set(values.get("flags", values.get("Features", "")).split())
    features = [label for flag, label in _CPU_FEATURES.items() if flag in flags]
    detail = f"{values.get('model name', platform.machine())}; {', '.join(features) or 'no vector extensions'}"
    if features:
        return Finding("CPU", "ok", detail)
    return Finding(
        "CPU", "warning", detail, "The embedded engine is several times slower here; use a processor with AVX2 or NEON."
    )


def num_cores() -> float:
    """Cores that this process may use: its affinity, and the quota of its cgroup where there is one."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    allowed = int(quota) / int(period) if quota.isdigit() else float("inf")
    return min(float(len(os.sched_getaffinity(0))), allowed)


def check_cores(cores: float) -> Finding:
    detail = f"{cores:g} usable"
    if cores < 2:
        return Finding(
            "cores", "warning", detail, "The demo takes about twice as long as on two cores; give it a second one."
        )
    return Finding("cores", "ok", detail)


def memory_bytes() -> tuple[int, int]:
    """(available, total), both under the limit of the cgroup where there is one."""
    lines = [line.split() for line in _read("/proc/meminfo").splitlines()]
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    available, total = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        available, total = min(available, int(limit) - int(used)), min(total, int(limit))
    return available, total


def check_memory(available_and_total: tuple[int, int]) -> Finding:
    available, total = available_and_total
    detail = f"{available / GIB:.1f} GiB available of {total / GIB:.1f}"
    if available < 4 * GIB:
        return Finding(
            "memory", "warning", detail, "The demo wants about 4 GiB; end other programs or raise the limit."
        )
    return Finding("memory", "ok", detail)


def check_gpu() -> Finding:
    import torch

    with warnings.catch_warnings():  # an old driver warns; the finding says so instead
        warnings.simplefilter("ignore")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        devices = [torch.cuda.get_device_properties(index) for index in range(count)]
        return Finding("GPU", "ok", "; ".join(f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB" for gpu in devices))
    if not Path("/proc/driver/nvidia/version").exists():
        return Finding(
            "GPU", "warning", "none", "The tiny model needs none; for larger ones use a machine with an NVIDIA GPU."
        )
    remedy = "Update the NVIDIA driver, or let this process see the device."
    if not torch.version.cuda:
        remedy = "Install the torch build for CUDA in place of the one for CPUs."
    return Finding("GPU", "warning", f"there is a driver, but torch {torch.__version__} sees no device", remedy)


# ---------------------------------------------------------------- where a model's code runs


def check_docker(trial: DockerTrial) -> Finding:
    return Finding("Docker engine", "warning" if trial.remedy else "ok", trial.found, trial.remedy)


def check_isolation(isolation: Isolation) -> Finding:
    """What a run gets by default: a sandbox was started to find out."""
    status: Status = "warning" if isolation.missing else "ok"
    return Finding("sandbox", status, in_words(isolation), " ".join(isolation.missing))


# ---------------------------------------------------------------- limits and space


def check_shared_memory(mount: Path) -> Finding:
    """New weights reach the generators through it."""
    if not mount.is_dir():
        return Finding(
            "shared memory", "missing", f"no {mount}", f"Mount it: `sudo mount -t tmpfs -o size=2G tmpfs {mount}`."
        )
    space = os.statvfs(mount)
    free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    detail = f"{free / GIB:.2f} GiB free of {size / GIB:.2f} in {mount}"
    if free < GIB / 4:
        remedy = f"Enlarge it: `sudo mount -o remount,size=2G {mount}`, or `docker run --shm-size=2g` in a container."
        return Finding("shared memory", "warning", detail, remedy)
    return Finding("shared memory", "ok", detail)


def check_open_files(soft: int, hard: int) -> Finding:
    def words(limit: int) -> str:
        return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"

    detail = f"{words(soft)} (may be raised to {words(hard)})"
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return Finding(
            "open files",
            "warning",
            detail,
            "Run `ulimit -n 65536` first, or raise nofile in /etc/security/limits.conf.",
        )
    return Finding("open files", "ok", detail)


def check_disk(folder: Path) -> Finding:
    where = folder.resolve()
    try:
        tempfile.TemporaryFile(dir=folder).close()  # permission bits say nothing to root, and nothing of a full disk
    except OSError as error:
        remedy = "Change into a folder of your own with room in it, or set `runs_folder` to one."
        return Finding("disk", "missing", f"{where} cannot be written: {error.strerror}", remedy)
    free = shutil.disk_usage(folder).free
    detail = f"{free / GIB:.1f} GiB free in {where}"
    if free < 2 * GIB:
        remedy = "Delete old runs or set `runs_folder` to a larger disk; checkpoints need room."
        return Finding("disk", "warning", detail, remedy)
    return Finding("disk", "ok", detail)


def _read(path: str) -> str:
    """The file's text; empty where there is none, as on a kernel without that interface."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
