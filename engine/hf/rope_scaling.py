"""The options of config.json that stretch a rotary embedding to longer contexts. Does not import torch.

The field `rope_type` selects the struct. engine/model/rope.py computes the frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class DefaultRope(msgspec.Struct, frozen=True, tag_field="rope_type", tag="default"):
    """A rotary embedding without scaling (arXiv 2104.09864)."""


class LinearRope(msgspec.Struct, frozen=True, tag_field="rope_type", tag="linear"):
    """A rotary embedding with all frequencies divided by `factor` (arXiv 2306.15595)."""

    factor: float


class YarnRope(msgspec.Struct, frozen=True, tag_field="rope_type", tag="yarn", omit_defaults=True):
    """YaRN: low frequencies are divided by `factor`, high ones are kept, with a ramp between (arXiv 2309.00071).

    `beta_fast` and `beta_slow` bound the ramp, in rotations over the original context. Cosine and sine are multiplied
    by `attention_factor`; its default follows from `factor`, `mscale` and `mscale_all_dim`.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # round the ends of the ramp to whole dimensions


class Llama3Rope(msgspec.Struct, frozen=True, tag_field="rope_type", tag="llama3"):
    """Llama 3.1's scaling: a ramp over wavelengths relative to the original context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling = DefaultRope | LinearRope | YarnRope | Llama3Rope
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def read_rope(fields: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the base and the unchecked fields of a RopeScaling, from a config.json of transformers 4 or 5.

    As in transformers, `rope_scaling` has precedence over `rope_parameters`, and the default of the original context is
    `max_position_embeddings`.
    """
    given: dict[str, Any] = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    rope = {name: value for name, value in given.items() if value is not None}
    theta = rope.pop("rope_theta", None) or fields.get("rope_theta") or 1e4
    old_name = rope.pop("type", "default")
    rope.setdefault("rope_type", old_name)
    if rope["rope_type"] in ("llama3", "yarn") and "max_position_embeddings" in fields:
        rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    return float(theta), rope
