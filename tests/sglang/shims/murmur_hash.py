"""MurmurHash3 (32 bits) in torch. SGLang uses this hash to derive sampling noise from seed, position and
column."""

import torch

_LOW = 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hash four blocks: the seed's lower and upper half [n], the position [n], the column [m].

    Returns int64 [n, m], below 2**32.
    """
    seed, position = seed.to(torch.int64)[:, None], positions.to(torch.int64)[:, None]
    mixed = torch.zeros_like(seed)
    for block in (seed & _LOW, (seed >> 32) & _LOW, position & _LOW, col_indices.to(torch.int64)[None]):
        mixed = _mix(mixed, block)
    mixed = mixed ^ 16  # length of the four blocks in bytes
    mixed = _times(mixed ^ (mixed >> 16), 0x85EBCA6B)
    mixed = _times(mixed ^ (mixed >> 13), 0xC2B2AE35)
    return mixed ^ (mixed >> 16)


def _mix(mixed: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _times(_rotated(_times(block, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotated(mixed ^ block, 13) * 5 + 0xE6546B64) & _LOW


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _LOW


def _times(word: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the product's lower 32 bits, computed in halves that do not overflow."""
    upper, lower = divmod(factor, 1 << 16)
    return (word * lower + (((word * upper) & 0xFFFF) << 16)) & _LOW
