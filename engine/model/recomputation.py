"""Activation checkpointing of a decoder layer: the backward pass recomputes activations instead of keeping them.

none       keeps all activations
selective  keeps the outputs of attention and of products that do not widen their input; recomputes norms, rotations,
           the query, gate and up projections where they are wider than the layer, and the inner part of the MLP
attention  keeps the layer's input and the output of attention; costs one more forward pass of the other parts
full       keeps only the layer's input; costs one more forward pass of the layers
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from asterism.configs.schema.learner_config import Checkpointing

Result = TypeVar("Result")

_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
}


def run_recomputed(recomputed: Checkpointing, compute: Callable[..., Result], *arguments: Any) -> Result:
    """Return compute(*arguments), with checkpoints if gradients are enabled. `compute` must draw no random numbers."""
    if recomputed == "none" or not torch.is_grad_enabled():
        return compute(*arguments)
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts  # slow: loads torch's compiler

    options: dict[str, Any] = {}
    if recomputed != "full":
        keeps = _keeps_attention if recomputed == "attention" else _keeps_narrow_products
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_choose_policy, keeps))
    return checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False, **options)


def _choose_policy(keeps: Callable[..., bool], _context: Any, operation: Any, *arguments: Any, **_options: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.MUST_SAVE if keeps(operation.name(), *arguments) else CheckpointPolicy.PREFER_RECOMPUTE


def _keeps_attention(name: str, *_arguments: Any) -> bool:
    return name in _ATTENTION


def _keeps_narrow_products(name: str, *arguments: Any) -> bool:
    return name in _ATTENTION or (name == "aten::mm" and arguments[1].shape[1] <= arguments[1].shape[0])
