"""Lists all checks by name, the cheap ones first. The last five compile kernels on a GPU."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from asterism.engine.hf.architectures import ARCHITECTURES
from benchmarks.gpu.checks.engine_checks import (
    check_graphs,
    check_prefill,
    check_published_weights,
    check_shared_weights,
)
from benchmarks.gpu.checks.kernel_checks import check_head, check_segments, check_shared_prompts
from benchmarks.gpu.checks.learner_checks import (
    check_cold_start,
    check_collectives,
    check_non_finite,
    check_offload,
    check_trainer_step,
)
from benchmarks.gpu.checks.measured import Measured
from benchmarks.gpu.checks.model_checks import check_bfloat16, check_compiled, check_float32

Check = Callable[[torch.device], Iterator[Measured]]


def list_checks(*, is_quick: bool) -> dict[str, Check]:
    """Return all checks by name. With `is_quick`, the output matrix has a small vocabulary."""
    architectures: dict[str, Check] = {}
    for name in ARCHITECTURES:
        architectures[f"float32_{name}"] = partial(check_float32, name)
        architectures[f"bfloat16_{name}"] = partial(check_bfloat16, name)
    return {
        **architectures,
        "segments": check_segments,
        "shared_prompts": check_shared_prompts,
        "non_finite": check_non_finite,
        "weights": check_published_weights,
        "collectives": check_collectives,
        "prefill": check_prefill,
        "graphs": check_graphs,
        "offload": check_offload,
        "shared_weights": check_shared_weights,
        "head_float32": partial(check_head, dtype=torch.float32, is_quick=is_quick),
        "head_bfloat16": partial(check_head, dtype=torch.bfloat16, is_quick=is_quick),
        "trainer_step": check_trainer_step,
        "cold_start": check_cold_start,
        "compiled": check_compiled,
    }


def prepare_device(device: torch.device) -> None:
    """Turn TF32 off, so that float32 products keep all 24 bits."""
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.cuda.set_device(device)
