"""Activation checkpointing of a decoder layer: the backward pass recomputes activations instead of keeping them.

none       keeps all activations
selective  keeps the outputs of attention and of products that do not widen their input; recomputes norms, rotations,
           the query, gate and up projections where they are wider than the layer, and the inner part of the MLP
full       keeps only the layer's input; costs one more forward pass of the layers
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from configs.algorithm import Checkpointing

Result = TypeVar("Result")

_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
}


def run_recomputed(recomputed: Checkpointing, compute: Callable[..., Result], *arguments: Any) -> Result:
    """Return compute(*arguments), which draws no random numbers.

    Without gradients nothing is kept in any case.
    """
    if recomputed == "none" or not torch.is_grad_enabled():
        return compute(*arguments)
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts  # imports torch's compiler

    contexts = partial(create_selective_checkpoint_contexts, _choose_policy)
    options: dict[str, Any] = {"context_fn": contexts} if recomputed == "selective" else {}
    return checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False, **options)


def _choose_policy(_context: Any, operation: Any, *arguments: Any, **_options: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    is_narrow_product = operation.name() == "aten::mm" and arguments[1].shape[1] <= arguments[1].shape[0]
    if is_narrow_product or operation.name() in _ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
