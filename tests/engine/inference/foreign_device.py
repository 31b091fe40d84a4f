"""Runs the engine's steps on a device that this machine does not have, in a separate process, because it patches torch.

Tensors have a shape, a type and a device, but no values, so that an operation on two devices raises, as on a GPU.
Operations that need a value get a default: no sequence finishes.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.backend_registration as backends
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode

from engine.contract import Capacity, GenerationRequest
from engine.inference.batch_state import BatchState
from engine.inference.engine_core import EngineCore
from engine.inference.sampling import SamplingFlags
from engine.model.causal_lm import CausalLM
from tests.engine.tiny_models import random_ids, small_config

DEVICE = "elsewhere"


class Moves(TorchFunctionMode):
    """Copies to the device, which tensors without values do not support."""

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


def _finish_no_sequence(append: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def appended(rows: BatchState, token_ids_B: Tensor, logprobs_B: Tensor) -> list[int]:
        try:
            return append(rows, token_ids_B, logprobs_B)
        except DynamicOutputShapeException:  # its last operation, which lists finished sequences
            return []

    return appended


def take_steps(dtype: torch.dtype, *, graphs: bool) -> int:
    """Prompts of several sizes, prefilled in chunks while other sequences run; then new weights."""
    torch.set_default_dtype(dtype)
    with torch.device(DEVICE):
        model = CausalLM(small_config())
    torch.set_default_dtype(torch.float32)
    capture = (lambda run: run) if graphs else None
    core = EngineCore(model, Capacity(512, 8, 96), prefill_tokens=20, capture=capture)
    for number in range(6):
        core.submit(
            GenerationRequest(number, random_ids(4 + 9 * number, number), 30, temperature=0.7, top_p=0.9, seed=number)
        )
        for _ in range(3):
            core.step()
    core.on_weights_changed(1)
    core.step()
    return core.get_load().generated_tokens


def main() -> None:
    backends._setup_privateuseone_for_python_backend(DEVICE)  # pyright: ignore[reportPrivateUsage]
    BatchState.append_tokens = _finish_no_sequence(BatchState.append_tokens)
    SamplingFlags.from_tensors = lambda settings: SamplingFlags(
        all_temperature_one=False, any_greedy=True, any_filtered=True
    )
    with FakeTensorMode(allow_non_fake_inputs=True), Moves():
        for dtype in (torch.float32, torch.bfloat16):
            for graphs in (False, True):
                sys.stdout.write(f"{take_steps(dtype, graphs=graphs)}\n")


if __name__ == "__main__":
    main()
