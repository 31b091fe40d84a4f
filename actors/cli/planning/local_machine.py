"""This machine is described for a plan: memory, disk and GPUs, and the measured rates of its devices."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from asterism.actors.launch.checks.input_checks import read_memory_bytes
from asterism.analysis.planning.plan_inputs import GPUS, PlannedMachines
from asterism.analysis.simulation.cluster_model import GpuSpec
from asterism.configs.schema.run_config import RunConfig

_MEASURED_S = 1.0  # duration of each measurement
_MATRIX_SIZES = {"cpu": 1024, "cuda": 8192}
_COPIED_BYTES = {"cpu": 256 * 2**20, "cuda": 2**30}


def detect_machine(run: RunConfig, *, measures: bool = False) -> PlannedMachines:
    """Describe this machine, with GPUs only if the run uses some: GPUs need torch. `measures` takes some seconds."""
    uses_gpus = "cuda" in (run.learner.device, run.engine.device)
    gpus, gpu = _find_gpus() if uses_gpus else (0, None)
    cpu = None
    if measures:
        gpu = None if gpu is None else _measure_rates(gpu, "cuda", run.learner.dtype)
        cpu = _measure_rates(GpuSpec("CPU", 0, 0, 0), "cpu", run.learner.dtype)
    folder = Path(run.runs_folder).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return PlannedMachines(
        gpus=gpus,
        gpu=gpu,
        nodes=run.cluster.nodes,
        host_memory_bytes=read_memory_bytes()[1],
        shared_memory_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        disk_bytes=shutil.disk_usage(existing).free,
        cpu=cpu,
    )


def _find_gpus() -> tuple[int, GpuSpec | None]:
    """Return the number of GPUs and the specification of the first one. The rates of an unknown GPU are 0."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return 0, None
    properties = torch.cuda.get_device_properties(0)
    known = next((gpu for name, gpu in GPUS.items() if name in properties.name.lower()), GpuSpec("", 0, 0, 0))
    return count, replace(known, name=properties.name, memory_bytes=float(properties.total_memory))


def _measure_rates(spec: GpuSpec, device: str, dtype: str) -> GpuSpec:
    """Measure matrix products in `dtype`, and copies: the device's rates then replace those of a data sheet."""
    import torch

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
    size = _MATRIX_SIZES[device]
    matrix = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)
    source = torch.ones(_COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    products_per_s = _count_per_second(lambda: matrix @ matrix, wait)
    copies_per_s = _count_per_second(lambda: target.copy_(source), wait)
    return replace(
        spec,
        flops=2.0 * size**3 * products_per_s,
        bandwidth=2.0 * source.nbytes * copies_per_s,
        flops_share=1.0,
        bandwidth_share=1.0,
    )


def _count_per_second(work: Callable[[], object], wait: Callable[[], None]) -> float:
    work()
    wait()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < _MEASURED_S:
        work()
        wait()
        count += 1
    return count / (time.perf_counter() - began)
