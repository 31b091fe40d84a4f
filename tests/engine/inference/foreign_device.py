"""Runs the engine's steps on a device that this machine does not have, in a separate process, because it patches torch.

Tensors have a shape, a type and a device, but no values, so that an operation on two devices raises, as on a GPU.
No sequence finishes.
"""

import sys
from typing import Any

import numpy as np
import torch
import torch.utils.backend_registration as backends
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from asterism.configs.schema.algorithm import Sampling
from asterism.engine.contract import Capacity, GenerationRequest
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.inference.pending_step import PendingStep
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.tiny_models import random_ids, small_config

DEVICE = "elsewhere"


class Moves(TorchFunctionMode):
    """A mode with copies to the device, which tensors without values do not support."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to and isinstance(args[1], torch.device):
            return _there(args[0])
        if func is torch.tensor and kwargs.pop("device", None) is not None:
            return _there(func(*args, **kwargs))
        if func is torch.Tensor.new_tensor:
            return _there(torch.tensor(args[1], dtype=args[0].dtype))
        return func(*args, **kwargs)


def _there(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)


def _read_first_tokens(self: PendingStep) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return token 0, which ends no sequence, in place of missing values."""
    count = len(self.launched.sequences)
    return np.zeros(count, np.int32), np.zeros(count, np.float32)


def take_steps(dtype: torch.dtype, *, graphs: bool) -> int:
    """Run prompts of several sizes, prefilled in chunks while other sequences run; then install new weights.

    The requests have greedy, filtered and plain sampling, and a temperature.
    """
    torch.set_default_dtype(dtype)
    with torch.device(DEVICE):
        model = CausalLM(small_config())
    torch.set_default_dtype(torch.float32)
    capture = (lambda run: run) if graphs else None
    core = EngineCore(model, Capacity(512, 8, 96), prefill_tokens=20, capture=capture)
    for number in range(6):
        temperature, top_p = ((1.0, 1.0), (0.7, 1.0), (0.7, 0.9), (0.0, 0.9))[min(number, 3)]
        ids = random_ids(4 + 9 * number, number)
        core.submit(GenerationRequest(number, ids, 30, Sampling(temperature=temperature, top_p=top_p), seed=number))
        for _ in range(3):
            core.step()
    core.on_weights_changed(1)
    core.step()
    return core.get_load().generated_tokens


def main() -> None:
    backends._setup_privateuseone_for_python_backend(DEVICE)  # pyright: ignore[reportPrivateUsage]
    PendingStep.read = _read_first_tokens
    with FakeTensorMode(allow_non_fake_inputs=True), Moves():
        for dtype in (torch.float32, torch.bfloat16):
            for graphs in (False, True):
                sys.stdout.write(f"{take_steps(dtype, graphs=graphs)}\n")


if __name__ == "__main__":
    main()
