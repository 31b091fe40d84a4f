"""Rotary embedding: frequencies of each scaling, tables of cosine and sine, and the rotation.

Formulas and order of operations are the same as in transformers, so that float32 tables have the same bits.
"""

import math
from typing import assert_never

import torch
from torch import Tensor

from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.hf.rope_scaling import DefaultRope, LinearRope, Llama3Rope, YarnRope


def compute_rope_tables(positions: Tensor, config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """Return cosine and signed sine, float32 [*positions.shape, head_dim], as `apply_rope` expects them."""
    frequencies, factor = _compute_frequencies(config, positions.device)
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate x [..., head_dim]; dimension i of the first half pairs with dimension i of the second half.

    The roll swaps the halves, and the sign of the sine makes the swap a rotation.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def _compute_frequencies(config: DecoderConfig, device: torch.device) -> tuple[Tensor, float]:
    """Return the frequencies, float32 [head_dim / 2], and the factor of cosine and sine."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    periods = config.rope_theta**exponents
    match config.rope_scaling:
        case DefaultRope():
            return 1.0 / periods, 1.0
        case LinearRope() as scaling:
            return 1.0 / periods / scaling.factor, 1.0
        case Llama3Rope() as scaling:
            return _scale_llama3(1.0 / periods, scaling), 1.0
        case YarnRope() as scaling:
            ramp = _compute_yarn_ramp(config, scaling).to(device)
            kept, divided = 1.0 / periods, 1.0 / (scaling.factor * periods)
            return divided * (1 - ramp) + kept * ramp, _compute_yarn_factor(scaling)
        case _:
            assert_never(config.rope_scaling)


def _scale_llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Divide frequencies of long wavelengths by the factor, keep frequencies of short wavelengths, and interpolate."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / scaling.factor, frequencies)
    share = (context / wavelengths - low) / (high - low)
    between = (1 - share) * scaled / scaling.factor + share * scaled
    is_between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(is_between, between, scaled)


def _compute_yarn_ramp(config: DecoderConfig, scaling: YarnRope) -> Tensor:
    """Return 1 where a frequency is kept and 0 where it is divided by the factor; [head_dim / 2]."""
    size, base = config.head_dim, config.rope_theta

    def find_dimension(rotations: float) -> float:
        context = scaling.original_max_position_embeddings
        return (size * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = find_dimension(scaling.beta_fast), find_dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # avoids a division by 0
    line = (torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)
    return 1 - line.clamp(0, 1)


def _compute_yarn_factor(scaling: YarnRope) -> float:
    def scale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1.0)
