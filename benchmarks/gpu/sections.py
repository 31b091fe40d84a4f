"""The sections of benchmarks.gpu, the most valuable first. A section imports torch only when it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from asterism.tasks.tiny.prepare import TinyDemo
from benchmarks.gpu.runs import DEMO, LARGE, QUICK
from benchmarks.support.qwen3_models import read_qwen3

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.result_file import Figures

GEMM_SIZE = 8192
COPIED_BYTES = 4 << 30
_SMALL_VOCABULARY = 512
_QUICK_LIMIT_S = 240.0


class GpuSection(NamedTuple):
    function: str  # MODULE:NAME below benchmarks.gpu; takes the device and `arguments`, and returns Figures
    arguments: Mapping[str, Any]
    estimate_s: float  # estimated seconds on an H100, with the start of the process; never measured
    limit_s: float

    def import_function(self) -> Callable[..., Figures]:
        module, _, name = self.function.partition(":")
        return getattr(import_module(f"benchmarks.gpu.{module}"), name)

    def measure(self, device: torch.device) -> Figures:
        """Measure in this process."""
        return self.import_function()(device=device, **self.arguments)


STEP, PASSES, HEAD = "training:measure_step", "training:measure_passes", "training:measure_head"
DECODE, WEIGHTS = "serving:measure_decoding", "serving:measure_weights"
COMPARED_RUNS, RUN = "runs:compare_demo", "runs:run_large"


def list_sections(*, is_quick: bool) -> dict[str, GpuSection]:
    """List the sections by name. With `is_quick`, the same sections measure a model of 0.3M parameters."""
    if is_quick:
        return {
            name: GpuSection(function, arguments, 15.0, _QUICK_LIMIT_S)
            for name, (function, arguments) in _list_quick_work().items()
        }
    decoded = {"config": read_qwen3("1.7B"), "batch": 64, "new_tokens": 256, "copied_bytes": COPIED_BYTES}
    passed = {"config": read_qwen3("8B"), "tokens": 8192, "gemm_size": GEMM_SIZE}
    return {
        "step_1.7B_8192": _step("1.7B", 8192, 45),
        "head": GpuSection(HEAD, {"tokens": 16_384}, 20, 60),
        "decode_1.7B": GpuSection(DECODE, decoded, 45, 120),
        "weights_1.7B": GpuSection(WEIGHTS, {"config": read_qwen3("1.7B")}, 45, 120),
        "step_4B_8192": _step("4B", 8192, 60),
        "step_1.7B_16384": _step("1.7B", 16_384, 50),
        "step_4B_16384": _step("4B", 16_384, 70),
        "passes_8B": GpuSection(PASSES, passed, 45, 120),
        "run_1.7B": GpuSection(RUN, {"settings": LARGE}, 90, 240),
        "demo": GpuSection(COMPARED_RUNS, {"settings": DEMO}, 150, 300),
        "step_0.6B_8192": _step("0.6B", 8192, 40),
        "step_0.6B_16384": _step("0.6B", 16_384, 40),
        "step_1.7B_8192_eager": _step("1.7B", 8192, 40, compile=False),
        "step_1.7B_8192_selective": _step("1.7B", 8192, 45, activation_checkpointing="selective"),
        "step_1.7B_8192_full": _step("1.7B", 8192, 45, activation_checkpointing="full"),
        "step_4B_8192_attention": _step("4B", 8192, 60, activation_checkpointing="attention"),
        "step_4B_8192_full": _step("4B", 8192, 60, activation_checkpointing="full"),
        "step_1.7B_8192_equal": _step("1.7B", 8192, 45, sequences_per_micro_batch=4),
    }


def _list_quick_work() -> dict[str, tuple[str, dict[str, Any]]]:
    small = TinyDemo().build_model_config(_SMALL_VOCABULARY)
    trained = {"config": small, "tokens": 256, "gemm_size": 256}
    return {
        "step_small_256": (STEP, trained),
        "head": (HEAD, {"tokens": 64, "vocabulary": _SMALL_VOCABULARY}),
        "decode_small": (DECODE, {"config": small, "batch": 4, "new_tokens": 16, "copied_bytes": 1 << 20}),
        "weights_small": (WEIGHTS, {"config": small}),
        "passes_small": (PASSES, trained),
        "demo": (COMPARED_RUNS, {"settings": QUICK}),
        "run_small": (RUN, {"settings": QUICK}),
    }


def _step(model: str, tokens: int, estimate_s: float, **changes: Any) -> GpuSection:
    """Build a section for a step. `changes` are settings of the learner, or `sequences_per_micro_batch`."""
    arguments = {"config": read_qwen3(model), "tokens": tokens, "gemm_size": GEMM_SIZE, **changes}
    return GpuSection(STEP, arguments, estimate_s, 3 * estimate_s)
