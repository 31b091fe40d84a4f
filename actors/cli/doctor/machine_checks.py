"""`asterism doctor` checks this machine for a run and gives a remedy for each problem.

The checks change nothing, except that they remove the leftovers of dead runs from this machine.
"""

import asyncio
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

from asterism.actors.cli.doctor.finding import CheckResult, DoctorFinding, run_check
from asterism.actors.launch.checks.input_checks import read_kernel_file, read_memory_bytes
from asterism.actors.launch.claim_run_folder import check_disk_space
from asterism.bus.process.scratch_lock import remove_stale_scratch
from asterism.configs.errors import GIB, format_bytes
from asterism.configs.schema.run_config import RunConfig
from asterism.sandbox.contract import Isolation
from asterism.sandbox.hosts.docker.docker_host import remove_stale_containers
from asterism.sandbox.hosts.docker.docker_probe import DockerProbeResult, probe_docker
from asterism.sandbox.isolation import format_isolation
from asterism.sandbox.select_backend import probe_isolation

_REINSTALL = "Run `make setup`, which installs the pinned packages into .venv."
_REMEDIES = {  # remedies of findings with which `asterism run` refuses to start
    "sandbox": "Change [sandbox], such as sandbox.backend, or repair what the message names: see docs/sandbox.md.",
    "disk": "Delete old runs or set `runs_folder` to a larger disk.",
}
_CPU_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "amx_bf16": "AMX BF16",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "BF16",
}


def examine(folder: Path = Path(), run: RunConfig | None = None) -> dict[str, DoctorFinding]:
    """Check everything that a run in `folder` needs, and the extra needs of `run`. Never raises.

    The checks take about as long as importing torch, and twice as long if the run's servers use GPUs.
    """
    checks: dict[str, Callable[[], CheckResult]] = {
        "Python": lambda: check_python(sys.version_info[:3]),
        "torch": check_torch,
        "uvloop": check_uvloop,
        "CPU": lambda: check_cpu(Path("/proc/cpuinfo")),
        "cores": lambda: check_cores(count_usable_cores()),
        "memory": lambda: check_memory(read_memory_bytes()),
        "GPU": check_gpu,
        "Docker engine": lambda: check_docker(probe_docker(os.environ)),
        "dead runs": remove_leftovers,
        "sandbox": lambda: check_isolation(probe_isolation(run.sandbox if run else None)),
        "shared memory": lambda: check_shared_memory(Path("/dev/shm")),
        "open files": lambda: check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        "disk": lambda: check_disk(folder / run.runs_folder if run else folder),
    }
    findings = {name: run_check(check, _REMEDIES.get(name, "")) for name, check in checks.items()}
    if findings["torch"].status == "missing":
        return findings
    from asterism.actors.cli.doctor.configuration_checks import check_run, check_sglang  # needs torch

    return findings | (check_run(run) if run else {"SGLang": run_check(lambda: check_sglang(folder))})


# ---------------------------------------------------------------- software


def check_python(version: tuple[int, ...]) -> CheckResult:
    detail = ".".join(map(str, version))
    if version < (3, 11):
        return DoctorFinding("missing", detail, "Install Python 3.11 or newer and run `make setup` with it.")
    return f"{detail} ({platform.python_implementation()}, {platform.machine()})"


def check_torch() -> CheckResult:
    try:
        import torch
    except (ImportError, OSError) as error:
        return DoctorFinding("missing", str(error), _REINSTALL)
    threads = torch.get_num_threads()
    return f"{torch.__version__}, {threads} {'thread' if threads == 1 else 'threads'} by default"


def check_uvloop() -> CheckResult:
    try:
        return importlib.metadata.version("uvloop")
    except importlib.metadata.PackageNotFoundError:
        return DoctorFinding("missing", "not installed", _REINSTALL)


# ---------------------------------------------------------------- processor, memory, GPU


def check_cpu(cpuinfo: Path) -> CheckResult:
    lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    values = {key.strip(): value.strip() for key, _, value in lines}
    flags = set(values.get("flags", values.get("Features", "")).split())
    features = [label for flag, label in _CPU_FEATURES.items() if flag in flags]
    detail = f"{values.get('model name', platform.machine())}; {', '.join(features) or 'no vector extensions'}"
    if features:
        return detail
    remedy = "Use a processor with AVX2 or NEON; without, the embedded engine is much slower."
    return DoctorFinding("warning", detail, remedy)


def count_usable_cores() -> float:
    """Count the cores that this process may use: the minimum of its affinity and its cgroup's quota."""
    quota, _, period = read_kernel_file("/sys/fs/cgroup/cpu.max").partition(" ")
    allowed = int(quota) / int(period) if quota.isdigit() else float("inf")
    return min(float(len(os.sched_getaffinity(0))), allowed)


def check_cores(cores: float) -> CheckResult:
    detail = f"{cores:g} usable"
    if cores < 2:
        return DoctorFinding("warning", detail, "Use two cores or more; on one the demo takes about twice as long.")
    return detail


def check_memory(available_and_total: tuple[int, int]) -> CheckResult:
    available, total = available_and_total
    detail = f"{format_bytes(available)} available of {format_bytes(total)}"
    if available < 4 * GIB:
        return DoctorFinding("warning", detail, "The demo needs about 4 GiB; stop other programs or raise the limit.")
    return detail


def check_gpu() -> CheckResult:
    import torch

    with warnings.catch_warnings():  # an old driver causes warnings; the finding reports it
        warnings.simplefilter("ignore")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        devices = [torch.cuda.get_device_properties(index) for index in range(count)]
        return "; ".join(f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB" for gpu in devices)
    if not Path("/proc/driver/nvidia/version").exists():
        remedy = 'Small models need none. With a GPU, set engine.device and learner.device to "cuda".'
        return DoctorFinding("warning", "none", remedy)
    remedy = "Update the NVIDIA driver, or give this process access to the device."
    if not torch.version.cuda:
        remedy = "Install the CUDA build of torch instead of the CPU build."
    return DoctorFinding("warning", f"a driver is loaded, but torch {torch.__version__} finds no device", remedy)


# ---------------------------------------------------------------- sandbox


def check_docker(trial: DockerProbeResult) -> CheckResult:
    return DoctorFinding("warning" if trial.remedy else "ok", trial.description, trial.remedy)


def check_isolation(isolation: Isolation) -> CheckResult:
    """Report the isolation of a sandbox that was started with the settings of the run, or with the defaults."""
    status = "warning" if isolation.missing else "ok"
    return DoctorFinding(status, format_isolation(isolation), " ".join(isolation.missing))


# ---------------------------------------------------------------- limits and space


def remove_leftovers() -> CheckResult:
    folders, num_containers = remove_stale_scratch(), asyncio.run(remove_stale_containers())
    containers = (f"{num_containers} container{'s' * (num_containers != 1)}",) if num_containers else ()
    removed = ", ".join((*map(str, folders), *containers))
    return f"removed {removed}" if removed else "left nothing behind"


def check_shared_memory(mount: Path) -> CheckResult:
    """Check the free space of the mount: generators receive new weights through shared memory."""
    if not mount.is_dir():
        return DoctorFinding("missing", f"no {mount}", f"Mount it: `sudo mount -t tmpfs -o size=2G tmpfs {mount}`.")
    space = os.statvfs(mount)
    free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    detail = f"{format_bytes(free)} free of {format_bytes(size)} in {mount}"
    if free < GIB / 4:
        remedy = f"Enlarge it: `sudo mount -o remount,size=2G {mount}`, or `docker run --shm-size=2g` in a container."
        return DoctorFinding("warning", detail, remedy)
    return detail


def check_open_files(soft: int, hard: int) -> CheckResult:
    def format_limit(limit: int) -> str:
        return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"

    detail = f"{format_limit(soft)} (may be raised to {format_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < 1024:
        remedy = "Run `ulimit -n 65536` first, or raise nofile in /etc/security/limits.conf."
        return DoctorFinding("warning", detail, remedy)
    return detail


def check_disk(folder: Path) -> CheckResult:
    """Check the folder, which a run creates if it does not exist. Raises UnusableInput, as a run does."""
    where = folder.resolve()
    folder = next(path for path in (where, *where.parents) if path.exists())
    try:
        # This writes a file because permission bits do not restrict root and do not show a full disk.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        remedy = "Change into a writable folder with free space, or set `runs_folder` to one."
        return DoctorFinding("missing", f"{where} cannot be written: {error.strerror}", remedy)
    check_disk_space(folder)
    free = shutil.disk_usage(folder).free
    detail = f"{format_bytes(free)} free in {where}"
    if free < 2 * GIB:
        remedy = "Delete old runs or set `runs_folder` to a larger disk: checkpoints need space."
        return DoctorFinding("warning", detail, remedy)
    return detail
