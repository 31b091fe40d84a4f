"""What a decode step costs, and how many KV tokens fit: from a model's shape and a GPU's data sheet.

A step over n running sequences with K cached tokens in all, that also prefills p tokens, takes

    fixed + max(weights, token * (n + p)) + sequence * n + kv_token * K + prefill_token * p + pair * (query-key pairs of p)

(A sequence that prefills is one of the n by the last of its tokens, and by what that reads; the others are p.)

The matrix products read all weights once whatever the batch, and become bound by arithmetic beyond some hundred tokens
(the roofline of one product); attention reads every running sequence's keys and values; the two follow one another.

Efficiencies are round numbers on the careful side of what engines reach in published profiles, the same for all GPUs of
a maker, since policies are compared on one and the same model and no absolute time is claimed:
    bandwidth 0.75   large reads of weights and paged KV caches, of the data sheet's peak
    arithmetic 0.5   bf16 products with some thousand rows (NVIDIA), 0.4 (AMD's MI300X, whose peak is harder to reach)
    fixed 2 ms       launch of a captured step, sampling, the engine's own scheduling
    sequence 10 us   sampling and bookkeeping of one sequence
Where a run was recorded, `analysis.simulation.calibration` replaces them all.
"""

from __future__ import annotations

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
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value

    @property
    def flops_per_pair(self) -> float:
        """Of attention, for one query and one key: two products of a multiplication and an addition each."""
        return 4.0 * self.layers * self.heads * self.head_dim


class Gpu(msgspec.Struct, frozen=True):
    """Peaks of the data sheet: bytes, bytes/s, dense bf16 FLOP/s; and the shares of them that count."""

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    bandwidth_share: float = 0.75
    flops_share: float = 0.5


class Cost(msgspec.Struct, frozen=True):
    """Seconds; see the file's head."""

    fixed_s: float
    weights_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0
    kv_token_s: float = 0.0
    prefill_token_s: float = 0.0
    pair_s: float = 0.0

    def constant_s(self, running: int, prefill: int = 0) -> float:
        """Of a step, without what depends on how many tokens are cached."""
        products_s = max(self.weights_s, self.token_s * (running + prefill))
        return self.fixed_s + products_s + self.sequence_s * running + self.prefill_token_s * prefill

    def step_s(self, running: int, kv_tokens: int, prefill: int = 0, pairs: float = 0.0) -> float:
        return self.constant_s(running, prefill) + self.kv_token_s * kv_tokens + self.pair_s * pairs

    def steps_s(self, running: int, kv_tokens: int, steps: int) -> float:
        """Of so many steps in a row: each lengthens every running sequence by a token."""
        read = kv_tokens * steps + running * steps * (steps - 1) / 2
        return self.constant_s(running) * steps + self.kv_token_s * read

    def steps_within(self, running: int, kv_tokens: int, seconds: float) -> int:
        """How many steps have ended after so many seconds: the inverse of `steps_s`, rounded down."""
        square = self.kv_token_s * running / 2
        linear = self.constant_s(running) + self.kv_token_s * (kv_tokens - running / 2)
        # 2c / (b + sqrt(b^2 + 4ac)), which is exact for a = 0 too
        steps = floor(2 * seconds / (linear + sqrt(linear * linear + 4 * square * seconds)))
        while self.steps_s(running, kv_tokens, steps + 1) <= seconds:
            steps += 1
        while steps > 0 and self.steps_s(running, kv_tokens, steps) > seconds:
            steps -= 1
        return steps


class Cluster(msgspec.Struct, frozen=True):
    """So many equal engines. `kv_tokens` of each."""

    name: str
    engines: int
    kv_tokens: int
    cost: Cost
    page_tokens: int = 16
    max_running: int = 512
    chunk_tokens: int = 2048  # that a step prefills at most
    latency_s: float = 0.0005  # of a message from one process to another


QWEN3_14B = ModelShape("Qwen3-14B", parameters=14.8e9, layers=40, heads=40, kv_heads=8, head_dim=128)
H100 = Gpu("H100-80GB", memory_bytes=80e9, bandwidth=3.35e12, flops=989e12)
H200 = Gpu("H200-141GB", memory_bytes=141e9, bandwidth=4.8e12, flops=989e12)
MI300X = Gpu("MI300X-192GB", memory_bytes=192e9, bandwidth=5.3e12, flops=1307e12, flops_share=0.4)


def roofline(model: ModelShape, gpu: Gpu, tensor_parallel: int = 1) -> Cost:
    bandwidth = tensor_parallel * gpu.bandwidth * gpu.bandwidth_share
    flops = tensor_parallel * gpu.flops * gpu.flops_share
    return Cost(
        fixed_s=2e-3,
        weights_s=model.weight_bytes / bandwidth,
        token_s=2 * model.parameters / flops,
        sequence_s=10e-6,
        kv_token_s=model.kv_bytes_per_token / bandwidth,
        pair_s=model.flops_per_pair / flops,
    )


def kv_capacity(model: ModelShape, gpu: Gpu, tensor_parallel: int = 1, memory_share: float = 0.9) -> int:
    """KV tokens beside the weights in the share of the memory that the engine may take."""
    room = tensor_parallel * gpu.memory_bytes * memory_share - model.weight_bytes
    return max(0, int(room // model.kv_bytes_per_token))


def cluster_of(model: ModelShape, gpu: Gpu, gpus: int, tensor_parallel: int = 1, memory_share: float = 0.9) -> Cluster:
    return Cluster(
        name=f"{gpus}x{gpu.name}",
        engines=gpus // tensor_parallel,
        kv_tokens=kv_capacity(model, gpu, tensor_parallel, memory_share),
        cost=roofline(model, gpu, tensor_parallel),
    )


CLUSTERS = {
    "8xh100": cluster_of(QWEN3_14B, H100, 8),
    "8xh200": cluster_of(QWEN3_14B, H200, 8),
    "64xmi300x": cluster_of(QWEN3_14B, MI300X, 64),
}
