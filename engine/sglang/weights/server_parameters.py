"""What a server must hold after an update: its parameters, made from the published ones, and their checksums.

SGLang fuses the projections of queries, keys and values, and those of gate and up. Tensor parallelism gives each rank equal
parts: rows of these projections, columns of the projections that follow them, and all of each norm. Experts and padded
vocabularies are not compared.

A checksum of a parameter has 64 bits. On CPUs: the first bytes of SHA-256. On GPUs: the function of SGLang's kernel
gpu_tensor_hash, with the MurmurHash3 finalizer of each word and its index, and the SplitMix64 finalizer of the sum.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SAMPLE_BYTES = 64 * 2**20  # of parameters that are compared after one update
_VOCABULARY_MULTIPLE = 64  # to which a server pads the vocabulary of each rank
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_CUT_BY_COLUMNS = ("o_proj", "down_proj")
_CUT_BY_ROWS = ("embed_tokens", "lm_head")

# Of gpu_tensor_hash.
_SEED = 0x243F6A88
_SEEDS = (_SEED, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
_INDEX_FACTORS, _INDEX_ROTATIONS = (0x27D4EB2D, 0x165667B1), (15, 13)
_TILE_WORDS, _BLOCK_TILES = 8192, 64
Words = NDArray[np.uint32]


def compute_expected_checksums(
    published: Mapping[str, Tensor], device: str, tp_rank: int, tp_size: int, version: int
) -> dict[str, str]:
    """By the server's parameter name, for a sample of SAMPLE_BYTES: another one in each version."""
    compute = _hash_on_gpu if device == "cuda" else _hash_on_cpu
    sources = _list_sources(published)
    if not sources:
        return {}
    start = version * 7919 % len(sources)  # a prime: consecutive versions compare distant layers
    rotated = [*sources[start:], *sources[:start]]
    sizes = [sum(published[name].nbytes for name in names) // tp_size for _, names in rotated]
    before = [0, *accumulate(sizes)]
    sample = [source for source, size in zip(rotated, before, strict=False) if size < SAMPLE_BYTES]
    expected: dict[str, str] = {}
    for server_name, names in sample:
        parts = [_cut(name, published[name], tp_rank, tp_size) for name in names]
        if all(part is not None for part in parts):
            expected[server_name] = f"{compute([part for part in parts if part is not None]):016x}"
    return expected


def _list_sources(published: Mapping[str, Tensor]) -> list[tuple[str, tuple[str, ...]]]:
    """The server's parameter names, each with the published parameters that it consists of."""
    sources: dict[str, tuple[str, ...]] = {}
    for name in published:
        fused = next((fused for fused, parts in _FUSED.items() if _get_module(name) in parts), None)
        if ".experts." in name:
            continue
        if fused is None:
            sources[name] = (name,)
        else:
            own = _get_module(name)
            sources[name.replace(own, fused)] = tuple(name.replace(own, part) for part in _FUSED[fused])
    return list(sources.items())


def _get_module(name: str) -> str:
    return name.split(".")[-2]


def _cut(name: str, tensor: Tensor, tp_rank: int, tp_size: int) -> Tensor | None:
    """The part of one tensor-parallel rank; None if it has another form than a part of equal size."""
    module = _get_module(name)
    if module in _CUT_BY_ROWS and len(tensor) % (_VOCABULARY_MULTIPLE * tp_size):
        return None
    if tp_size == 1 or not (module in _CUT_BY_ROWS or module.endswith("_proj")):
        return tensor
    if module in _CUT_BY_COLUMNS:
        is_even = tensor.dim() == 2 and tensor.shape[1] % tp_size == 0
        return tensor.chunk(tp_size, dim=1)[tp_rank] if is_even else None
    if module in ("k_proj", "v_proj"):
        return None  # a server with fewer key/value heads than ranks repeats them
    return tensor.chunk(tp_size)[tp_rank] if len(tensor) % tp_size == 0 else None


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
    """The sum of the 64-bit values of the tiles of a block, which begins at the word `start`."""
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
    """MurmurHash3's finalizer."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _finalize_64(x: int) -> int:
    """SplitMix64's finalizer."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def _view_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
