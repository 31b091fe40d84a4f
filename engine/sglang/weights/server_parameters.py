"""Computes the parameters that a server must hold after an update, and their checksums, from the published weights.

SGLang 0.5.23 fuses the projections of queries, keys and values, and those of gate and up. Tensor parallelism gives
each rank equal parts: rows of these projections and of vocabularies, columns of the projections that follow them, and
all of each norm. Source of the padding: sglang/srt/configs/update_config.py.

Some parameters have a form that depends on more than the server reports; they are not compared (_has_known_form).

A checksum of a parameter has 64 bits. On CPUs it is the start of the SHA-256. On GPUs it is the function of SGLang's
kernel gpu_tensor_hash: the MurmurHash3 finalizer of each word and its index, and the SplitMix64 finalizer of their sum.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from asterism.engine.sglang.http_api import ServerInfo

SAMPLE_BYTES = 64 * 2**20  # bytes of parameters to compare after one update; the last parameter can exceed this
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_VOCABULARY, _VOCABULARY_MULTIPLE = ("embed_tokens", "lm_head"), 64  # padded rows are a multiple of 64
_MLP, _MLP_MULTIPLE = ("gate_proj", "up_proj", "down_proj"), 32  # each rank's rows or columns: a multiple of 32 on CPUs
_CUT_BY_COLUMNS = ("o_proj", "down_proj")

# Constants of gpu_tensor_hash.
_SEED = 0x243F6A88
_SEEDS = (_SEED, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
_INDEX_FACTORS, _INDEX_ROTATIONS = (0x27D4EB2D, 0x165667B1), (15, 13)
_TILE_WORDS, _BLOCK_TILES = 8192, 64
Words = NDArray[np.uint32]


def compute_expected_checksums(
    published: Mapping[str, Tensor], server: ServerInfo, tp_rank: int, version: int
) -> dict[str, str]:
    """Return checksums by the server's parameter name, for a sample of SAMPLE_BYTES that changes with each version."""
    compute = _hash_on_gpu if server.device == "cuda" else _hash_on_cpu
    sources = _list_sources(published, server)
    start = version * 7919 % max(1, len(sources))  # a prime: consecutive versions compare distant layers
    rotated = [*sources[start:], *sources[:start]]
    sizes = [sum(published[name].nbytes for name in names) // server.tp_size for _, names in rotated]
    before = [0, *accumulate(sizes)]
    return {
        server_name: f"{compute([_cut(name, published[name], server, tp_rank) for name in names]):016x}"
        for (server_name, names), size in zip(rotated, before, strict=False)
        if size < SAMPLE_BYTES
    }


def get_fused_name(projection: str) -> str:
    """Return the name of the server's layer that contains the projection."""
    return next((fused for fused, parts in FUSED.items() if projection in parts), projection)


def _list_sources(published: Mapping[str, Tensor], server: ServerInfo) -> list[tuple[str, tuple[str, ...]]]:
    """List the server's parameters of known form by name, each with the published parameters that it consists of."""
    sources: dict[str, tuple[str, ...]] = {}
    for name, tensor in published.items():
        if not _has_known_form(name, tensor, server):
            continue
        own = _get_module(name)
        fused = get_fused_name(own)
        sources[name.replace(own, fused)] = tuple(name.replace(own, part) for part in FUSED.get(fused, (own,)))
    return list(sources.items())


def _has_known_form(name: str, tensor: Tensor, server: ServerInfo) -> bool:
    module, is_on_cpu = _get_module(name), server.device == "cpu"
    if server.quantization is not None or server.dtype != str(tensor.dtype).removeprefix("torch."):
        return False  # the server converts the parameters
    if server.enable_dp_attention:
        return False  # attention and vocabularies are divided among other ranks than the rest
    if ".experts." in name:
        return False  # experts are stacked in the layout of a kernel
    if is_on_cpu and tensor.dim() == 2 and tensor.dtype != torch.float32 and module != "embed_tokens":
        return False  # the package sgl_kernel packs parameters for AMX (layers/amx_utils.py)
    # Key/value heads are repeated if there are fewer of them than ranks; on CPUs, heads are padded.
    return server.tp_size == 1 or module not in _ATTENTION or (module == "o_proj" and not is_on_cpu)


def _get_module(name: str) -> str:
    return name.split(".")[-2]


def _cut(name: str, tensor: Tensor, server: ServerInfo, tp_rank: int) -> Tensor:
    """Return the part of one tensor-parallel rank, after padding."""
    module, tp_size = _get_module(name), server.tp_size
    dim = 1 if module in _CUT_BY_COLUMNS else 0
    if dim == tensor.dim() or module not in (*_VOCABULARY, *_MLP, *_CUT_BY_COLUMNS):
        return tensor
    multiple = tp_size
    if module in _VOCABULARY:
        padded = -(-len(tensor) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        multiple = _VOCABULARY_MULTIPLE * (1 if padded % tp_size == 0 else tp_size)
    elif module in _MLP and server.device == "cpu":
        multiple = _MLP_MULTIPLE * tp_size
    if missing := -tensor.shape[dim] % multiple:
        tensor = pad(tensor, (0, missing) if dim == tensor.dim() - 1 else (0, 0, 0, missing))
    return tensor.chunk(tp_size, dim)[tp_rank]


def _hash_on_cpu(parts: Sequence[Tensor]) -> int:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(_view_bytes(part).data)
    return int.from_bytes(digest.digest()[:8], "big")


def _hash_on_gpu(parts: Sequence[Tensor]) -> int:
    content = np.concatenate([_view_bytes(part) for part in parts])
    words = np.pad(content, (0, -len(content) % 4)).view(np.uint32)
    total = 0
    for start in range(0, len(words), _TILE_WORDS * _BLOCK_TILES):
        total += _sum_tiles(words[start : start + _TILE_WORDS * _BLOCK_TILES], start, len(words))
    return _finalize_64(total & 0xFFFFFFFFFFFFFFFF)


def _sum_tiles(words: Words, start: int, num_words: int) -> int:
    """Return the sum of the 64-bit values of the tiles of a block, which begins at the word `start`."""
    index = np.arange(start, start + len(words), dtype=np.uint64).astype(np.uint32)
    halves: list[NDArray[np.uint64]] = []
    for seed, factor, rotation in zip(_SEEDS, _INDEX_FACTORS, _INDEX_ROTATIONS, strict=True):
        place = (index * np.uint32(factor) + np.uint32(seed)) ^ (
            (index << np.uint32(rotation)) | (index >> np.uint32(32 - rotation))
        )
        mixed = _finalize_32(words ^ place)
        sums = np.add.reduceat(mixed, range(0, len(mixed), _TILE_WORDS), dtype=np.uint32)
        halves.append(_finalize_32(sums ^ np.uint32(4 * num_words & 0xFFFFFFFF)).astype(np.uint64))
    high, low = halves
    return sum(((high << np.uint64(32)) | low).tolist())


def _finalize_32(x: Words) -> Words:
    """Apply MurmurHash3's finalizer."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _finalize_64(x: int) -> int:
    """Apply SplitMix64's finalizer."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def _view_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
