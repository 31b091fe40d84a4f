"""Floating-point operations of training, from a model's sizes; a multiplication and an addition count as two.

Only matrix products count: norms, activations and recomputed passes do not. Only the experts that a token uses count.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from asterism.engine.hf.model_config import DecoderConfig

PASSES = 3  # the backward pass has two products for each product of the forward pass


class ForwardFlops(NamedTuple):
    """The floating-point operations of a forward pass."""

    per_token: float  # operations of the products in the layers
    per_scored_token: float  # operations of the product with the output matrix
    per_pair: float  # operations of attention between two tokens

    @property
    def attention_tokens(self) -> float:
        """The sequence length at which attention costs as much as the products, if all tokens are scored."""
        return 2 * (self.per_token + self.per_scored_token) / self.per_pair

    def count_training(self, lengths: Iterable[int], num_scored: int) -> float:
        """Count forward and backward passes over sequences of these lengths, with `num_scored` tokens in the loss."""
        forward = num_scored * self.per_scored_token
        for length in lengths:
            forward += length * self.per_token + length * (length + 1) / 2 * self.per_pair
        return PASSES * forward


def count_forward_flops(config: DecoderConfig) -> ForwardFlops:
    shapes = config.compute_weight_shapes()
    sizes = {name: prod(shape) for name, shape in shapes.items() if ".layers." in name and len(shape) == 2}
    experts = config.experts
    used = 1.0 if experts is None else experts.experts_per_token / experts.num_experts
    return ForwardFlops(
        per_token=2 * sum(size * (used if ".experts." in name else 1) for name, size in sizes.items()),
        per_scored_token=2 * config.vocab_size * config.hidden_size,
        per_pair=4 * config.num_layers * config.num_heads * config.head_dim,
    )
