"""Estimate step costs and KV capacity from a model's shape and a GPU's data sheet.

A step with n running sequences, K cached tokens in total and p prefilled tokens takes

    fixed + max(weights, token * (n + p)) + sequence * n + kv_token * K + prefill_token * p + pair * (query-key pairs of p)

(n and K include a prefilled sequence's last token and the tokens that it reads; p includes its other tokens.)

The matrix products read all weights once for any batch, and are bound by arithmetic beyond some hundred
tokens (the roofline of one product). Attention, which follows, reads the keys and values of every running
sequence.

Efficiencies are round, conservative figures from published profiles of engines, the same for all GPUs of
a vendor: the simulator compares policies on one model and predicts no absolute times.
    bandwidth 0.75   large reads of weights and paged KV caches, of the data sheet's peak
    arithmetic 0.5   bf16 products with some thousand rows (NVIDIA); 0.4 for AMD's MI300X
    fixed 2 ms       launch of a captured step, sampling, the engine's own scheduling
    sequence 10 us   sampling and bookkeeping of one sequence
`asterism.analysis.simulation.calibration` fits all costs to a recorded run instead.
"""

from math import floor, sqrt

import msgspec


class ModelShape(msgspec.Struct, frozen=True):
    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    bytes_per_value: int = 2  # bf16

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value

    @property
    def flops_per_pair(self) -> float:
        """FLOPs of attention for one query and one key: two products, each a multiplication and an addition."""
        return 4.0 * self.layers * self.heads * self.head_dim


class GpuSpec(msgspec.Struct, frozen=True):
    """A GPU: peaks of its data sheet (bytes, bytes/s, dense bf16 FLOP/s), and the reachable shares of these peaks."""

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    bandwidth_share: float = 0.75
    flops_share: float = 0.5


class StepCostModel(msgspec.Struct, frozen=True):
    """Costs of a step in seconds; see the module's docstring."""

    fixed_s: float
    weights_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0
    kv_token_s: float = 0.0
    prefill_token_s: float = 0.0
    pair_s: float = 0.0

    def compute_constant_s(self, running: int, prefill: int = 0) -> float:
        """Return the seconds of a step without the costs of cached tokens."""
        products_s = max(self.weights_s, self.token_s * (running + prefill))
        return self.fixed_s + products_s + self.sequence_s * running + self.prefill_token_s * prefill

    def compute_step_s(self, running: int, kv_tokens: int, prefill: int = 0, pairs: float = 0.0) -> float:
        return self.compute_constant_s(running, prefill) + self.kv_token_s * kv_tokens + self.pair_s * pairs

    def compute_steps_s(self, running: int, kv_tokens: int, steps: int) -> float:
        """Return the seconds of successive decode steps: each appends one token to every running sequence."""
        read = kv_tokens * steps + running * steps * (steps - 1) / 2
        return self.compute_constant_s(running) * steps + self.kv_token_s * read

    def count_steps_within(self, running: int, kv_tokens: int, seconds: float) -> int:
        """Count the steps that `seconds` completes: the inverse of `compute_steps_s`, rounded down."""
        square = self.kv_token_s * running / 2
        linear = self.compute_constant_s(running) + self.kv_token_s * (kv_tokens - running / 2)
        # 2c / (b + sqrt(b^2 + 4ac)), which is exact for a = 0 too
        steps = floor(2 * seconds / (linear + sqrt(linear * linear + 4 * square * seconds)))
        while self.compute_steps_s(running, kv_tokens, steps + 1) <= seconds:
            steps += 1
        while steps > 0 and self.compute_steps_s(running, kv_tokens, steps) > seconds:
            steps -= 1
        return steps


class SimulatedCluster(msgspec.Struct, frozen=True):
    """A cluster of equal engines; `kv_tokens` is per engine."""

    name: str
    engines: int
    kv_tokens: int
    cost: StepCostModel
    page_tokens: int = 16
    max_running: int = 512
    chunk_tokens: int = 2048  # maximum of prefilled tokens per step
    latency_s: float = 0.0005  # latency of a message between two processes


QWEN3_14B = ModelShape("Qwen3-14B", parameters=14.8e9, layers=40, heads=40, kv_heads=8, head_dim=128)
A100 = GpuSpec("A100-80GB", memory_bytes=80e9, bandwidth=2.04e12, flops=312e12)
H100 = GpuSpec("H100-80GB", memory_bytes=80e9, bandwidth=3.35e12, flops=989e12)
H200 = GpuSpec("H200-141GB", memory_bytes=141e9, bandwidth=4.8e12, flops=989e12)
MI300X = GpuSpec("MI300X-192GB", memory_bytes=192e9, bandwidth=5.3e12, flops=1307e12, flops_share=0.4)


def estimate_roofline_cost(model: ModelShape, gpu: GpuSpec, tensor_parallel: int = 1) -> StepCostModel:
    bandwidth = tensor_parallel * gpu.bandwidth * gpu.bandwidth_share
    flops = tensor_parallel * gpu.flops * gpu.flops_share
    return StepCostModel(
        fixed_s=2e-3,
        weights_s=model.weight_bytes / bandwidth,
        token_s=2 * model.parameters / flops,
        sequence_s=10e-6,
        kv_token_s=model.kv_bytes_per_token / bandwidth,
        pair_s=model.flops_per_pair / flops,
    )


def compute_kv_capacity(model: ModelShape, gpu: GpuSpec, memory_share: float) -> int:
    """Count the KV tokens that fit next to the weights into the engine's share of the memory."""
    available_bytes = gpu.memory_bytes * memory_share - model.weight_bytes
    return max(0, int(available_bytes // model.kv_bytes_per_token))


def build_cluster(model: ModelShape, gpu: GpuSpec, gpus: int, memory_share: float = 0.9) -> SimulatedCluster:
    """Build a cluster with an engine on each GPU."""
    return SimulatedCluster(
        name=f"{gpus}x{gpu.name}",
        engines=gpus,
        kv_tokens=compute_kv_capacity(model, gpu, memory_share),
        cost=estimate_roofline_cost(model, gpu),
    )


CLUSTERS = {
    "8xh100": build_cluster(QWEN3_14B, H100, 8),
    "8xh200": build_cluster(QWEN3_14B, H200, 8),
    "64xmi300x": build_cluster(QWEN3_14B, MI300X, 64),
}
