"""Samples tokens from logits: inverse CDF with one uniform number per token, from the seed and the token's position."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import astuple
from numpy.typing import NDArray
from torch import Tensor

from asterism.configs.schema.algorithm import Sampling


class SamplingTensors(NamedTuple):
    """Sampling parameters of B rows; all [B]. The fields after the seed are the fields of Sampling, as in `pack_sampling`."""

    mixed_seed: Tensor  # int64: the result of mix_seed for the request's seed
    temperature: Tensor  # float32; 0 is greedy
    top_p: Tensor  # float32; 1: no filter
    top_k: Tensor  # int64; 0: no filter


def pack_sampling(sampling: Sampling) -> NDArray[np.float32]:
    """Return the F fields as float32 [F], which is exact for top_k: a vocabulary has fewer than 2^24 tokens."""
    return np.array(astuple(sampling), np.float32)


_DEFAULTS_F = pack_sampling(Sampling())


class SamplingFlags(NamedTuple):
    """The operations that some rows need, computed at each change of the rows."""

    all_temperature_one: bool
    any_greedy: bool
    any_filtered: bool  # whether some rows set other parameters than the temperature

    @classmethod
    def from_values(cls, values_FB: NDArray[np.float32]) -> SamplingFlags:
        """`values_FB`: the result of `pack_sampling` for each row."""
        temperature_B = values_FB[0]
        return cls(
            all_temperature_one=bool((temperature_B == 1).all()),
            any_greedy=bool((temperature_B == 0).any()),
            any_filtered=bool((values_FB[1:] != _DEFAULTS_F[1:, None]).any()),
        )


def sample(
    logits_BV: Tensor, positions_B: Tensor, sampling: SamplingTensors, flags: SamplingFlags | None = None
) -> tuple[Tensor, Tensor]:
    """Return the tokens at `positions_B`, int64 [B], and their logprobs, float32 [B].

    Logprobs come from softmax(logits / temperature) before top-p and top-k; for greedy tokens, temperature is 1.
    Overwrites the logits. asterism.engine.inference.buffer_sizes.count_sampling_bytes counts the allocated memory.
    """
    flags = flags or SamplingFlags.from_values(torch.stack(sampling[1:]).numpy(force=True))
    if not flags.all_temperature_one:
        divisor = torch.where(sampling.temperature == 0, 1.0, sampling.temperature)
        logits_BV.div_(divisor[:, None])
    heaviest_B = logits_BV.argmax(-1) if flags.any_greedy else None
    logprobs_BV = logits_BV.log_softmax(-1)
    weights_BV = torch.exp(logprobs_BV, out=logits_BV)
    if flags.any_filtered:
        _filter_top_p_top_k(weights_BV, sampling.top_p, sampling.top_k)
    tokens_B = inverse_cdf(weights_BV, draw_uniform(sampling.mixed_seed, positions_B))
    if heaviest_B is not None:
        tokens_B = torch.where(sampling.temperature == 0, heaviest_B, tokens_B)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None]).squeeze(-1)


def inverse_cdf(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the first token with a cumulative weight above uniform * total: never a token of weight 0, never V.

    Overwrites the weights with their sums.
    """
    sums_BV = weights_BV.cumsum_(-1)
    total_B = sums_BV[:, -1]
    share_B = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    tokens_B = torch.searchsorted(sums_BV, share_B[:, None], right=True).squeeze(-1)
    return tokens_B.clamp_(max=weights_BV.shape[-1] - 1)  # only NaN reaches V, and the caller reports NaN


def _filter_top_p_top_k(weights_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> None:
    """Zero weights outside the k heaviest, then weights outside the smallest set with top_p of the remaining total."""
    ordered_BV, order_BV = torch.sort(weights_BV, dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(weights_BV.shape[-1], device=weights_BV.device)
    limit_B = torch.where(top_k_B > 0, top_k_B, float(weights_BV.shape[-1]))
    ordered_BV.masked_fill_(ranks_V >= limit_B[:, None], 0.0)
    sums_BV = ordered_BV.cumsum(-1)
    bound_B1 = top_p_B[:, None] * sums_BV[:, -1:]
    before_BV = sums_BV.sub_(ordered_BV)
    outside_BV = before_BV >= bound_B1
    outside_BV.logical_and_((top_p_B < 1)[:, None]).logical_and_(ranks_V > 0)
    weights_BV.scatter_(-1, order_BV, ordered_BV.masked_fill_(outside_BV, 0.0))


def _to_int64(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = _to_int64(0x9E3779B97F4A7C15)
_MIX_FACTOR_1 = _to_int64(0xBF58476D1CE4E5B9)
_MIX_FACTOR_2 = _to_int64(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right logically, filling with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix_seed(seed: int) -> int:
    """Return the first round of splitmix64 over the low 64 bits of the seed, as int64 for `draw_uniform`."""
    x = (seed + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return _to_int64(x ^ (x >> 31))


def draw_uniform(mixed_seed_B: Tensor, positions_B: Tensor) -> Tensor:
    """Draw float32 in [0, 1): 24 bits of splitmix64 (Steele et al. 2014) over seed and position, in wrapping int64."""
    x = _mix(mixed_seed_B + (positions_B + 1) * _GOLDEN_GAMMA)
    return _shift_right(x, 40).to(torch.float32) * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_FACTOR_1
    x = (x ^ _shift_right(x, 27)) * _MIX_FACTOR_2
    return x ^ _shift_right(x, 31)
