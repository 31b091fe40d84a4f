"""Which GPUs a server's interpreter sees, and whether they are enough for the servers of one machine.

Of a GPU's free memory a server leaves 1 - memory_share alone; weights and cache have the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from configs.schema import Engine
from configs.sglang import SPARE_TOKENS, Sglang
from engine.checkpoint import load_config
from engine.qwen3 import Qwen3, Qwen3Config
from engine.sglang.fit import ServerUnusable, Wanted
from engine.sglang.interpreter import answer_of, last_line

_ASK = """
import json, torch
cuda = torch.cuda
seen = [(cuda.get_device_name(number), *cuda.mem_get_info(number)) for number in range(cuda.device_count())]
print(json.dumps([torch.__version__, seen]))
"""
_GIB = 2**30


class Gpu(msgspec.Struct, frozen=True, array_like=True):
    name: str
    free_bytes: int
    total_bytes: int


class Seen(msgspec.Struct, frozen=True, array_like=True):
    torch: str  # its version
    gpus: list[Gpu]


class Room(NamedTuple):
    """Of one GPU."""

    weights_bytes: int
    cache_tokens: int  # that it has to hold at least
    token_bytes: int
    free_bytes: int  # of the GPU that has least, for both

    @property
    def tokens(self) -> int:
        return max(0, self.free_bytes - self.weights_bytes) // self.token_bytes


async def gpus_seen_by(python: str, variables: Mapping[str, str]) -> Seen:
    """Raises ServerUnusable where its torch cannot say."""
    code, output, errors = await answer_of(python, _ASK, variables)
    if code != 0:
        raise ServerUnusable(
            f"sglang.python = {python}: its torch cannot say which GPUs there are: {last_line(errors)}"
        )
    return msgspec.json.decode(last_line(output), type=Seen)


def check_count(seen: Seen, engine: Engine, sglang: Sglang) -> Sequence[Gpu]:
    """Those that the servers take. Raises ServerUnusable where there are fewer."""
    count = engine.num_engines * sglang.tensor_parallel * sglang.data_parallel
    if len(seen.gpus) < count:
        keys = f"engine.num_engines = {engine.num_engines}, sglang.tensor_parallel = {sglang.tensor_parallel} and"
        has = f"torch {seen.torch} of the server's interpreter sees {len(seen.gpus) or 'none'}"
        raise ServerUnusable(
            f"{keys} sglang.data_parallel = {sglang.data_parallel} take {count} GPUs in all, and {has}"
        )
    return seen.gpus[:count]


def check_room(gpus: Sequence[Gpu], wanted: Wanted) -> Room:
    """Raises ServerUnusable where weights and cache are more than what is free. What a server takes beside them is not
    counted."""
    room = _room(gpus, wanted, load_config(wanted.model))
    if room.tokens < room.cache_tokens:
        engine, share = wanted.engine, wanted.sglang.memory_share
        key = f"engine.kv_tokens = {engine.kv_tokens}" if engine.kv_tokens else f"sglang.memory_share = {share:g}"
        raise ServerUnusable(
            f"{key}: each GPU needs {_gib(room.weights_bytes)} for weights and {_gib(room.cache_tokens * room.token_bytes)}"
            f" for a cache of {room.cache_tokens} tokens, and one has {_gib(room.free_bytes)} for both"
        )
    return room


def _room(gpus: Sequence[Gpu], wanted: Wanted, config: Qwen3Config) -> Room:
    engine, sglang = wanted.engine, wanted.sglang
    dtype: torch.dtype = getattr(torch, engine.dtype)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Qwen3(config).parameters())
    heads = -(
        -config.num_kv_heads // sglang.tensor_parallel
    )  # where there are more GPUs than heads, some have the same
    token_bytes = 2 * config.num_layers * heads * config.head_dim * dtype.itemsize
    free = min(gpu.free_bytes for gpu in gpus)
    return Room(
        weights_bytes=parameters * dtype.itemsize // sglang.tensor_parallel,
        cache_tokens=engine.kv_tokens // sglang.data_parallel or wanted.sequence_tokens + SPARE_TOKENS,
        token_bytes=token_bytes,
        free_bytes=free if engine.kv_tokens else int(free * sglang.memory_share),
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
