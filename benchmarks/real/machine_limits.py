"""Measures the matrix products and the memory bandwidth of this machine, and derives limits of tokens per second.

All limits are rooflines: no time is shorter than its floating-point operations over the fastest measured product, nor
than its bytes over the measured bandwidth. With B sequences of T tokens in the cache,

    decode step   max((weights + B * T * bytes of a token's keys and values) / bandwidth,
                      B * (per_token + per_scored_token + T * per_pair) / product rate)
    prefill       operations of B prompts, with one scored token each, / product rate
    training      3 * operations of a forward pass over all sequences / product rate

The operations are those of asterism.engine.model.training_flops; `weights` are the bytes of all parameters.
"""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.model.training_flops import count_forward_flops
from benchmarks.real.real_workload import DTYPES, RealWorkload

ROWS = (1, 16, 64, 2048)  # rows of the products: a decode step of 1, 16 and 64 sequences, and a micro batch
SQUARE = 4096
_BANDWIDTH_BYTES = 1 << 29
Shape = tuple[int, int]  # inputs and outputs of a matrix


class MachineLimits(NamedTuple):
    """Limits for one model in one dtype."""

    config: DecoderConfig
    bytes_per_value: int
    gflops: float  # the fastest measured product
    bytes_per_s: float

    def compute_decode_rate(self, batch: int, cached_tokens: int) -> float:
        """Return the tokens per second of `batch` sequences, each with this number of tokens in the cache."""
        return batch / self._compute_step_s(batch, cached_tokens)

    def compute_request_rate(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        """Return the new tokens per second of whole requests that start together."""
        flops = count_forward_flops(self.config)
        pairs = prompt_tokens * (prompt_tokens + 1) / 2
        prefill = batch * (prompt_tokens * flops.per_token + flops.per_scored_token + pairs * flops.per_pair)
        steps = sum(self._compute_step_s(batch, prompt_tokens + number) for number in range(1, new_tokens))
        return batch * new_tokens / (prefill / (self.gflops * 1e9) + steps)

    def compute_training_rate(self, lengths: Iterable[int], num_scored: int) -> float:
        """Return the tokens per second of an update over sequences of these lengths."""
        lengths = list(lengths)
        flops = count_forward_flops(self.config).count_training(lengths, num_scored)
        return sum(lengths) / (flops / (self.gflops * 1e9))

    def _compute_step_s(self, batch: int, cached_tokens: int) -> float:
        config, flops = self.config, count_forward_flops(self.config)
        values = batch * cached_tokens * config.count_cache_values()
        read_s = (config.count_parameters() + values) * self.bytes_per_value / self.bytes_per_s
        operations = batch * (flops.per_token + flops.per_scored_token + cached_tokens * flops.per_pair)
        return max(read_s, operations / (self.gflops * 1e9))


def has_bfloat16() -> bool:
    """Return whether the processor has instructions for products of bfloat16."""
    features = torch.cpu.get_capabilities()
    return any(features.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def measure_products(
    config: DecoderConfig, dtype: torch.dtype, rows: tuple[int, ...], square: int, repeats: int
) -> dict[str, float]:
    """Return GFLOP/s by shape and rows, over all of the model's matrices of a shape, and over all matrices by rows."""
    matrices = _draw_matrices(config, dtype)
    found: dict[str, float] = {}
    for count in rows:
        seconds, values = 0.0, 0
        for (inputs, outputs), group in matrices.items():
            x_NK = torch.randn(count, inputs, dtype=dtype)
            took_s = _measure_best_s(lambda x_NK=x_NK, group=group: [x_NK @ each for each in group], repeats)
            group_values = len(group) * inputs * outputs
            found[f"{inputs}x{outputs}_{count}"] = _compute_gflops(count, group_values, took_s)
            seconds, values = seconds + took_s, values + group_values
        found[f"model_{count}"] = _compute_gflops(count, values, seconds)
    a, b = torch.randn(square, square, dtype=dtype), torch.randn(square, square, dtype=dtype)
    found["square"] = _compute_gflops(square, square * square, _measure_best_s(lambda: a @ b, repeats))
    return found


def _draw_matrices(config: DecoderConfig, dtype: torch.dtype) -> dict[Shape, list[Tensor]]:
    """Draw the model's matrices by shape. A product of all matrices of a shape reads most of them from main memory."""
    shapes = [shape for shape in config.compute_weight_shapes().values() if len(shape) == 2]
    matrices: dict[Shape, list[Tensor]] = {}
    for outputs, inputs in shapes:
        matrices.setdefault((inputs, outputs), []).append(torch.randn(inputs, outputs, dtype=dtype))
    return matrices


def _compute_gflops(rows: int, values: int, seconds: float) -> float:
    return 2 * rows * values / seconds / 1e9


def measure_bandwidth(repeats: int) -> float:
    """Return the bytes per second of the faster of two ways: a sum, which only reads, and a copy."""
    source = torch.ones(_BANDWIDTH_BYTES // 4)
    into = torch.empty_like(source)
    read_s, copy_s = (_measure_best_s(each, repeats) for each in (source.sum, lambda: into.copy_(source)))
    return max(_BANDWIDTH_BYTES / read_s, 2 * _BANDWIDTH_BYTES / copy_s)


def _measure_best_s(work: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest repeat, after one that does not count."""
    taken: list[float] = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def measure_limits(work: RealWorkload, rows: tuple[int, ...], square: int) -> tuple[MachineLimits, dict[str, float]]:
    """Measure the machine in the workload's dtype, and in the other dtypes of the processor."""
    torch.set_num_threads(work.threads)
    bytes_per_s = measure_bandwidth(work.repeats)
    figures, fastest = {"bandwidth_gb_per_s": bytes_per_s / 1e9}, dict[str, float]()
    for name, dtype in DTYPES.items():
        if name in (work.dtype, "float32") or has_bfloat16():
            products = measure_products(work.config, dtype, rows, square, work.repeats)
            fastest[name] = max(products.values())
            figures |= {f"{name}_gflops_{product}": gflops for product, gflops in products.items()}
    print(f"limits: {bytes_per_s / 1e9:.1f} GB/s, fastest products in GFLOP/s: {fastest}", flush=True)
    return MachineLimits(work.config, work.torch_dtype.itemsize, fastest[work.dtype], bytes_per_s), figures
