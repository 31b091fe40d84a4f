"""Muon for matrices, AdamW for everything else.

torch.optim.Muon is not used: its Newton-Schulz iteration runs in bfloat16, whose rounding turns a difference of 1e-8
between the gradients of one and of two ranks into one of 1e-3 between their updates, and it takes one matrix at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from configs.schema import Learner, Sft
from engine.distributed import whole
from engine.newton_schulz import orthogonalized

MOMENTUM = 0.95


class Muon(Optimizer):
    """Momentum, Nesterov's look-ahead, orthogonalization, scaled by sqrt(max(1, rows / columns)).

    Sharded matrices are gathered, and every rank orthogonalizes them whole: the update is that of a single rank.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": MOMENTUM})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameters in _by_shape(group["params"]).values():
                self._step_alike(parameters, group["lr"], group["weight_decay"], group["momentum"])
        return loss

    def _step_alike(self, parameters: list[nn.Parameter], lr: float, weight_decay: float, momentum: float) -> None:
        """Update matrices of one shape together: a batched product is much faster than many small ones."""
        directions = [self._look_ahead(parameter, momentum) for parameter in parameters]
        updates_KRC = orthogonalized(torch.stack([whole(direction) for direction in directions]))
        scale = math.sqrt(max(1.0, updates_KRC.shape[-2] / updates_KRC.shape[-1]))
        for parameter, update_RC in zip(parameters, updates_KRC, strict=True):
            parameter.mul_(1.0 - lr * weight_decay)
            parameter.add_(_sharded_like(update_RC, parameter), alpha=-lr * scale)

    def _look_ahead(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        velocity = state["momentum"].lerp_(gradient, 1.0 - momentum)
        return gradient.lerp(velocity, momentum)


def _by_shape(parameters: list[nn.Parameter]) -> dict[torch.Size, list[nn.Parameter]]:
    alike: defaultdict[torch.Size, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            alike[parameter.shape].append(parameter)
    return alike


def _sharded_like(update: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of an update that every rank has whole."""
    if not isinstance(parameter, DTensor):
        return update
    replicated = DTensor.from_local(update, parameter.device_mesh, run_check=False)
    return replicated.redistribute(placements=parameter.placements)


def sft_optimizers(model: nn.Module, sft: Sft) -> list[Optimizer]:
    """Muon for the layers' matrices; AdamW for embeddings and norms."""
    matrices, others = _split(model)
    return [
        Muon(matrices, lr=sft.muon_lr, weight_decay=sft.weight_decay),
        AdamW(others, lr=sft.lr, betas=(0.9, 0.95), weight_decay=sft.weight_decay, foreach=True),
    ]


def rl_optimizers(model: nn.Module, learner: Learner) -> list[Optimizer]:
    """AdamW for all: Muon's full-rank updates are too coarse for the small changes of reinforcement learning."""
    return [
        AdamW(model.parameters(), lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay, foreach=True)
    ]


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if hidden else others).append(parameter)
    return matrices, others
