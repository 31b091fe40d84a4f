"""Compiles parts of decoder layers (projections, norms, rotations, SwiGLU) and the pointwise part of the output head.

All layers of a model share the compiled code, for any number of tokens. torch compiles a part separately for training,
for passes without gradients, and for frozen weights. It stores the code in TORCHINDUCTOR_CACHE_DIR, by default
/tmp/torchinductor_USER, so that a restarted learner loads it. torch raises an error if it compiles a part more than
_MAX_COMPILATIONS times.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from asterism.configs.schema.learner_config import Checkpointing
from asterism.engine.model.recomputation import run_recomputed
from asterism.policies.losses.head_kernels import FusedHeadKernels, HeadKernels

Result = TypeVar("Result")
_MAX_COMPILATIONS = 32  # 8 are too few for cold start, adapters, reference, passes without gradients, chunk sizes


def run_eagerly(
    part: Callable[..., Result], recomputed: Checkpointing, layer: nn.Module, x_BTE: Tensor, *inputs: Tensor
) -> Result:
    """Call part(layer, x_BTE, *inputs); its backward pass recomputes the activations that `recomputed` names."""
    return run_recomputed(recomputed, part, layer, x_BTE, *inputs)


def run_compiled(
    part: Callable[..., Result], recomputed: Checkpointing, layer: nn.Module, x_BTE: Tensor, *inputs: Tensor
) -> Result:
    """Call the compiled part. The only token of an empty micro batch runs eagerly: torch compiles size 1 separately."""
    if x_BTE.shape[1] == 1:
        return run_eagerly(part, recomputed, layer, x_BTE, *inputs)
    return _compile(part, recomputed)(layer, x_BTE, *inputs)


@cache
def _compile(part: Callable[..., Result], recomputed: Checkpointing) -> Callable[..., Result]:
    def run(layer: nn.Module, x_BTE: Tensor, *inputs: Tensor) -> Result:
        return run_eagerly(part, recomputed, layer, x_BTE, *inputs)

    _raise_limit()
    # torch limits the compilations of each code object, so each part and mode has its own code object.
    run.__code__ = run.__code__.replace(co_name=f"{part.__name__}_{recomputed}")
    return torch.compile(run, dynamic=True, fullgraph=True)


@cache
def compile_head_kernels() -> HeadKernels:
    """Return kernels compiled for one vocabulary size, so that they read several values at once.

    The first temperature is compiled in, too; the code for a second temperature serves all others.
    """
    _raise_limit()
    return FusedHeadKernels(partial(torch.compile, fullgraph=True))


def _raise_limit() -> None:
    from torch._dynamo import config  # a slow import

    config.recompile_limit = _MAX_COMPILATIONS
