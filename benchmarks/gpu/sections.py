"""The sections of benchmarks.gpu, the most valuable first. A section imports torch only when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.support.qwen3_models import read_qwen3
from configs.tiny_options import TinyConfig
from engine.model.model_config import DecoderConfig, build_tiny_config

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.result_file import Figures

GEMM_SIZE = 8192
COPIED_BYTES = 4 << 30
_SMALL_VOCABULARY = 512
_QUICK_LIMIT_S = 240.0

Work = Callable[["torch.device"], "Figures"]


class GpuSection(NamedTuple):
    work: Work
    estimate_s: float  # on an H100, with the start of the process; not measured yet
    limit_s: float


def list_sections(*, is_quick: bool) -> dict[str, GpuSection]:
    """By name. `is_quick`: the same measurements with a model of 0.3M parameters."""
    if is_quick:
        return {name: GpuSection(work, 15.0, _QUICK_LIMIT_S) for name, work in _list_quick_work().items()}
    return {
        "step_1.7B_8192": _step("1.7B", 8192, 45),
        "head": GpuSection(_head(16_384), 20, 60),
        "decode_1.7B": GpuSection(_decode(read_qwen3("1.7B"), 64, 256, COPIED_BYTES), 45, 120),
        "weights_1.7B": GpuSection(_weights(read_qwen3("1.7B")), 30, 90),
        "step_4B_8192": _step("4B", 8192, 60),
        "step_1.7B_16384": _step("1.7B", 16_384, 50),
        "step_4B_16384": _step("4B", 16_384, 70),
        "passes_8B": GpuSection(_passes(read_qwen3("8B"), 8192, GEMM_SIZE), 45, 120),
        "run_1.7B": GpuSection(_run(is_quick=False), 90, 180),
        "demo": GpuSection(_demo(is_quick=False), 100, 200),
        "step_0.6B_8192": _step("0.6B", 8192, 40),
        "step_0.6B_16384": _step("0.6B", 16_384, 40),
        "step_1.7B_8192_eager": _step("1.7B", 8192, 40, compile=False),
        "step_1.7B_8192_selective": _step("1.7B", 8192, 45, activation_checkpointing="selective"),
        "step_1.7B_8192_full": _step("1.7B", 8192, 45, activation_checkpointing="full"),
        "step_4B_8192_attention": _step("4B", 8192, 60, activation_checkpointing="attention"),
        "step_4B_8192_full": _step("4B", 8192, 60, activation_checkpointing="full"),
        "step_1.7B_8192_equal": _step("1.7B", 8192, 45, sequences_per_micro_batch=4),
    }


def _list_quick_work() -> dict[str, Work]:
    small = build_tiny_config(TinyConfig(), _SMALL_VOCABULARY)
    return {
        "step_small_256": _measure_step(small, 256, 256),
        "head": _head(64, vocabulary=_SMALL_VOCABULARY),
        "decode_small": _decode(small, 4, 16, 1 << 20),
        "weights_small": _weights(small),
        "passes_small": _passes(small, 256, 256),
        "demo": _demo(is_quick=True),
        "run_small": _run(is_quick=True),
    }


def _step(model: str, tokens: int, estimate_s: float, **changes: Any) -> GpuSection:
    """`changes`: of the learner's settings, or `sequences_per_micro_batch` of equal lengths."""
    return GpuSection(_measure_step(read_qwen3(model), tokens, GEMM_SIZE, **changes), estimate_s, 3 * estimate_s)


def _measure_step(config: DecoderConfig, tokens: int, gemm_size: int, **changes: Any) -> Work:
    def work(device: torch.device) -> Figures:
        from benchmarks.gpu.training import measure_step

        return measure_step(config, tokens, device, gemm_size, **changes)

    return work


def _passes(config: DecoderConfig, tokens: int, gemm_size: int) -> Work:
    def work(device: torch.device) -> Figures:
        from benchmarks.gpu.training import measure_passes

        return measure_passes(config, tokens, device, gemm_size)

    return work


def _head(tokens: int, **changes: int) -> Work:
    def work(device: torch.device) -> Figures:
        from benchmarks.gpu.training import measure_head

        return measure_head(tokens, device, **changes)

    return work


def _decode(config: DecoderConfig, batch: int, new_tokens: int, copied_bytes: int) -> Work:
    def work(device: torch.device) -> Figures:
        from benchmarks.gpu.serving import measure_decoding

        return measure_decoding(config, device, batch=batch, new_tokens=new_tokens, copied_bytes=copied_bytes)

    return work


def _weights(config: DecoderConfig) -> Work:
    def work(device: torch.device) -> Figures:
        from benchmarks.gpu.serving import measure_weights

        return measure_weights(config, device)

    return work


def _demo(*, is_quick: bool) -> Work:
    def work(device: torch.device) -> Figures:
        from benchmarks.gpu.runs import DEMO, QUICK, compare_demo

        return compare_demo(device.type, QUICK if is_quick else DEMO)

    return work


def _run(*, is_quick: bool) -> Work:
    def work(device: torch.device) -> Figures:
        from benchmarks.gpu.runs import LARGE, QUICK, run_large

        return run_large(device.type, QUICK if is_quick else LARGE)

    return work
