"""The machines that a plan is for: equal nodes, with or without GPUs."""

from typing import NamedTuple

import msgspec

from analysis.simulation.cluster_model import A100, H100, H200, MI300X, GpuSpec

GIB = 2**30

# Memory in GB, bandwidth and dense bf16 rate from the data sheets of the SXM and OAM modules:
# https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
# https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet (H100)
# https://www.nvidia.com/en-us/data-center/h200/
# https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
GPUS = {"a100": A100, "h100": H100, "h200": H200, "mi300x": MI300X}


class PlannedMachines(msgspec.Struct, frozen=True):
    """Memory and disk are those of one node. None: unknown, and not compared."""

    gpus: int = 0  # per node
    gpu: GpuSpec | None = None
    nodes: int = 1
    host_memory_bytes: float | None = None
    shared_memory_bytes: float | None = None  # of /dev/shm
    disk_bytes: float | None = None  # free, where the run's folder is
    cpu: GpuSpec | None = None  # measured rates of the processor, without memory


class Assumptions(NamedTuple):
    """Numbers that no file gives. Printed with the plan, and changeable."""

    mfu: float = 0.4  # share of the learner's peak rate
    mean_tokens_share: float = 0.5  # mean response over dialogue.response_tokens
    gpu_reserve_gib: float = 2.0  # of each GPU: CUDA context, NCCL, fragments of the allocator
    process_gib: float = 0.5  # of the host: interpreter and libraries of one learner rank or engine
