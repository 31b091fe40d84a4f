"""Parts of decoder layers, compiled by torch.compile: products with fused norms, rotations and SwiGLU.

All layers of a model share the compiled code, for any number of tokens. torch compiles a part once for training, and once
more for passes without gradients and for frozen weights. It stores the code in TORCHINDUCTOR_CACHE_DIR, by default
/tmp/torchinductor_USER, so that a restarted learner loads it. After 8 compilations of a part, torch logs a warning with
the cause of the last one and computes eagerly.
"""

from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")


def run_eagerly(part: Callable[Inputs, Result], *inputs: Inputs.args, **options: Inputs.kwargs) -> Result:
    return part(*inputs, **options)


def run_compiled(part: Callable[..., Result], layer: nn.Module, x_BTE: Tensor, *inputs: Tensor) -> Result:
    """torch compiles sizes of 1 separately: the only token of an empty micro batch is not worth it."""
    compute = part if x_BTE.shape[1] == 1 else _compile(part)
    return compute(layer, x_BTE, *inputs)


@cache
def _compile(part: Callable[..., Result]) -> Callable[..., Result]:
    return torch.compile(part, dynamic=True, fullgraph=True)
