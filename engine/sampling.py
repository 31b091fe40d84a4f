"""From logits to tokens: inverse CDF with one uniform per token, which depends on its seed and position alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Settings(NamedTuple):
    """How each of B rows samples; all [B]."""

    temperature: Tensor  # float32; 0 is greedy
    top_p: Tensor  # float32; 1 takes all
    top_k: Tensor  # int64; 0 takes all
    seed: Tensor  # int64, any bits


class Shortcuts(NamedTuple):
    """What no row asks for and may be left out; found again whenever the rows change."""

    plain: bool  # all at temperature 1
    greedy: bool  # at least one
    filtered: bool  # top-p or top-k in at least one

    @classmethod
    def of(cls, settings: Settings) -> Shortcuts:
        return cls(
            plain=bool((settings.temperature == 1).all()),
            greedy=bool((settings.temperature == 0).any()),
            filtered=bool(((settings.top_p < 1) | (settings.top_k > 0)).any()),
        )


def sample(
    logits_BV: Tensor, positions_B: Tensor, settings: Settings, shortcuts: Shortcuts | None = None
) -> tuple[Tensor, Tensor]:
    """The next tokens, int64 [B], which stand at `positions_B`, and their logprobs, float32 [B].

    A logprob is taken under softmax(logits / temperature) before top-p and top-k; a greedy one at temperature 1.
    """
    shortcuts = shortcuts or Shortcuts.of(settings)
    if not shortcuts.plain:
        heat = torch.where(settings.temperature == 0, 1.0, settings.temperature)
        logits_BV = logits_BV / heat[:, None]
    logprobs_BV = logits_BV.log_softmax(-1)
    weights_BV = logprobs_BV.exp()
    if shortcuts.filtered:
        weights_BV = _filtered(weights_BV, settings.top_p, settings.top_k)
    tokens_B = inverse_cdf(weights_BV, uniform(settings.seed, positions_B))
    if shortcuts.greedy:
        tokens_B = torch.where(settings.temperature == 0, logits_BV.argmax(-1), tokens_B)
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None]).squeeze(-1)


def inverse_cdf(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token whose cumulated weight exceeds the uniform's share: never one of weight 0, never V."""
    sums_BV = weights_BV.cumsum(-1)
    total_B = sums_BV[:, -1]
    share_B = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    tokens_B = torch.searchsorted(sums_BV, share_B[:, None], right=True).squeeze(-1)
    return tokens_B.clamp_(max=weights_BV.shape[-1] - 1)  # reached by NaN alone, which the caller reports


def _filtered(weights_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor:
    """Weights outside the k heaviest become 0, then those outside the smallest set that holds top_p of the rest."""
    ordered_BV, order_BV = torch.sort(weights_BV, dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(weights_BV.shape[-1], device=weights_BV.device)
    limit_B = torch.where(top_k_B > 0, top_k_B, weights_BV.shape[-1])
    ordered_BV = ordered_BV.masked_fill(ranks_V >= limit_B[:, None], 0.0)
    sums_BV = ordered_BV.cumsum(-1)
    before_BV = sums_BV - ordered_BV
    outside_BV = (before_BV >= top_p_B[:, None] * sums_BV[:, -1:]) & (top_p_B < 1)[:, None] & (ranks_V > 0)
    return torch.zeros_like(weights_BV).scatter_(-1, order_BV, ordered_BV.masked_fill(outside_BV, 0.0))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Right shift of int64 without its sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seed_B: Tensor, positions_B: Tensor) -> Tensor:
    """float32 in [0, 1), 24 bits of splitmix64 (Steele et al. 2014) over seed, then position. Wrapping int64."""
    x = _mix(_mix(seed_B + _STEP) + (positions_B + 1) * _STEP)
    return _shift(x, 40).to(torch.float32) * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)
