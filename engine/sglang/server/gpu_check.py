"""Checks that the GPUs visible to a server's interpreter suffice for all servers of one machine.

The weights and KV cache of a server can use the share sglang.memory_share of each GPU's free memory.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from asterism.configs.errors import format_bytes
from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.sglang import SPARE_TOKENS, SGLangConfig
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.hf_checkpoint import load_model_config
from asterism.engine.sglang.server.compatibility import ServerRequirements, ServerUnusable
from asterism.engine.sglang.server.interpreter_check import extract_last_line, run_python

_GPU_QUERY_PROGRAM = """
import json, torch
cuda = torch.cuda
seen = [(cuda.get_device_name(number), *cuda.mem_get_info(number)) for number in range(cuda.device_count())]
print(json.dumps([torch.__version__, seen]))
"""


class VisibleGpu(msgspec.Struct, frozen=True, array_like=True):
    name: str
    free_bytes: int
    total_bytes: int


class GpuInventory(msgspec.Struct, frozen=True, array_like=True):
    torch_version: str
    gpus: list[VisibleGpu]


class GpuMemoryBudget(NamedTuple):
    """Memory of one GPU that a server needs and has."""

    weights_bytes: int
    min_cache_tokens: int
    kv_bytes_per_token: int
    free_bytes: int  # memory for weights and cache, on the GPU with the least free memory

    @property
    def max_cache_tokens(self) -> int:
        return max(0, self.free_bytes - self.weights_bytes) // self.kv_bytes_per_token


async def query_gpu_inventory(python: str, variables: Mapping[str, str]) -> GpuInventory:
    """List the GPUs of the interpreter's torch. Raises ServerUnusable if torch cannot list GPUs."""
    code, output, errors = await run_python(python, _GPU_QUERY_PROGRAM, variables)
    if code != 0:
        raise ServerUnusable(f"sglang.python = {python}: its torch cannot list the GPUs: {extract_last_line(errors)}")
    return msgspec.json.decode(extract_last_line(output), type=GpuInventory)


def check_gpu_count(inventory: GpuInventory, engine: EngineConfig, sglang: SGLangConfig) -> Sequence[VisibleGpu]:
    """Return the GPUs that the servers use. Raises ServerUnusable if there are too few."""
    count = engine.num_engines * sglang.tensor_parallel * sglang.data_parallel
    if len(inventory.gpus) < count:
        raise ServerUnusable(
            f"engine.num_engines = {engine.num_engines}, sglang.tensor_parallel = {sglang.tensor_parallel} and "
            f"sglang.data_parallel = {sglang.data_parallel} need {count} GPUs, but torch {inventory.torch_version} of "
            f"the server's interpreter sees {len(inventory.gpus) or 'none'}"
        )
    return inventory.gpus[:count]


def check_memory_budget(gpus: Sequence[VisibleGpu], requirements: ServerRequirements) -> GpuMemoryBudget:
    """Return the budget. Raises ServerUnusable if weights and KV cache exceed the free memory of a GPU."""
    budget = _compute_memory_budget(gpus, requirements, load_model_config(requirements.model))
    if budget.max_cache_tokens < budget.min_cache_tokens:
        engine, share = requirements.engine, requirements.sglang.memory_share
        cache_bytes = budget.min_cache_tokens * budget.kv_bytes_per_token
        key = f"engine.kv_tokens = {engine.kv_tokens}" if engine.kv_tokens else f"sglang.memory_share = {share:g}"
        raise ServerUnusable(
            f"{key}: each GPU needs {format_bytes(budget.weights_bytes)} for weights and {format_bytes(cache_bytes)} "
            f"for a cache of {budget.min_cache_tokens} tokens, but one has only {format_bytes(budget.free_bytes)}"
        )
    return budget


def _compute_memory_budget(
    gpus: Sequence[VisibleGpu], requirements: ServerRequirements, config: DecoderConfig
) -> GpuMemoryBudget:
    engine, sglang = requirements.engine, requirements.sglang
    dtype: torch.dtype = getattr(torch, engine.dtype)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in CausalLM(config).parameters())
    # With more GPUs than KV heads, several GPUs hold the same head.
    heads = -(-config.num_kv_heads // sglang.tensor_parallel)
    token_bytes = 2 * config.num_layers * heads * config.head_dim * dtype.itemsize
    free = min(gpu.free_bytes for gpu in gpus)
    return GpuMemoryBudget(
        weights_bytes=parameters * dtype.itemsize // sglang.tensor_parallel,
        min_cache_tokens=engine.kv_tokens // sglang.data_parallel or requirements.sequence_tokens + SPARE_TOKENS,
        kv_bytes_per_token=token_bytes,
        free_bytes=free if engine.kv_tokens else int(free * sglang.memory_share),
    )
