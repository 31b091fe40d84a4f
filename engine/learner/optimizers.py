"""The optimizers of asterism.configs.choices.optimizer_kinds.

torch.optim.Muon is not used: it processes one matrix at a time, and its Newton-Schulz iteration runs in bfloat16, which
turns a difference of 1e-8 between gradients of one and of two ranks into a difference of 1e-3 between updates.
"""

import math
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from asterism.configs.choices.optimizer_kinds import OPTIMIZER_KINDS
from asterism.configs.schema.algorithm import SftConfig
from asterism.configs.schema.learner_config import LearnerConfig
from asterism.engine.learner.distributed import gather_full

MOMENTUM = 0.95
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class Muon(Optimizer):
    """Nesterov momentum with orthogonalized updates, scaled by sqrt(max(1, rows / columns)).

    Every rank gathers sharded matrices and orthogonalizes them whole, so that the update equals a single rank's update.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": MOMENTUM})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameters in _group_by_shape(group["params"]).values():
                self._step_same_shape(parameters, group["lr"], group["weight_decay"], group["momentum"])
        return loss

    def _step_same_shape(self, parameters: list[nn.Parameter], lr: float, weight_decay: float, momentum: float) -> None:
        """Update matrices of one shape together: a batched product is much faster than many small products."""
        directions = [self._apply_momentum(parameter, momentum) for parameter in parameters]
        updates_KRC = orthogonalize(torch.stack([gather_full(direction) for direction in directions]))
        scale = math.sqrt(max(1.0, updates_KRC.shape[-2] / updates_KRC.shape[-1]))
        for parameter, update_RC in zip(parameters, updates_KRC, strict=True):
            parameter.mul_(1.0 - lr * weight_decay)
            parameter.add_(_shard_like(update_RC, parameter), alpha=-lr * scale)

    def _apply_momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        velocity = state["momentum"].lerp_(gradient, 1.0 - momentum)
        return gradient.lerp(velocity, momentum)


def orthogonalize(matrices_KRC: Tensor) -> Tensor:
    """Move the singular values of K matrices [R, C] to about 1 (0.7 to 1.2), by five quintic Newton-Schulz steps.

    Source: https://kellerjordan.github.io/posts/muon/
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    tall = matrices_KRC.shape[-2] > matrices_KRC.shape[-1]
    x = matrices_KRC.mT if tall else matrices_KRC
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _group_by_shape(parameters: list[nn.Parameter]) -> dict[torch.Size, list[nn.Parameter]]:
    by_shape: defaultdict[torch.Size, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_shape[parameter.shape].append(parameter)
    return by_shape


def _shard_like(update: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of an update that every rank has whole."""
    if not isinstance(parameter, DTensor):
        return update
    replicated = DTensor.from_local(update, parameter.device_mesh, run_check=False)
    return replicated.redistribute(placements=parameter.placements)


class OptimizerOptions(NamedTuple):
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    muon_lr: float = 0.0  # rate of Muon in the cold start


Parameters = Mapping[str, nn.Parameter]  # parameters by name
BuildOptimizers = Callable[[Parameters, OptimizerOptions], list[Optimizer]]


def build_sft_optimizers(model: nn.Module, sft: SftConfig) -> list[Optimizer]:
    """Build the optimizers of all parameters. If RL resumes with adapters, some are frozen."""
    options = OptimizerOptions(sft.lr, (0.9, 0.95), sft.weight_decay, sft.muon_lr)
    return _get_builder(sft.optimizer)(dict(model.named_parameters()), options)


def build_rl_optimizers(model: nn.Module, learner: LearnerConfig) -> list[Optimizer]:
    config = learner.optimizer
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return _get_builder(config.name)(trained, OptimizerOptions(config.lr, config.betas, config.weight_decay))


def _get_builder(name: str) -> BuildOptimizers:
    return pkgutil.resolve_name(OPTIMIZER_KINDS[name].code)


def build_adamw(parameters: Parameters, options: OptimizerOptions) -> list[Optimizer]:
    lr, betas, weight_decay, _ = options
    return [AdamW(parameters.values(), lr=lr, betas=betas, weight_decay=weight_decay, fused=True)]


def build_muon(parameters: Parameters, options: OptimizerOptions) -> list[Optimizer]:
    """Build Muon for the layers' matrices and AdamW for the other parameters."""
    matrices = {name: each for name, each in parameters.items() if _is_hidden_matrix(name, each)}
    others = {name: each for name, each in parameters.items() if name not in matrices}
    muon = Muon(matrices.values(), lr=options.muon_lr, weight_decay=options.weight_decay)
    return [muon, *build_adamw(others, options)]


def _is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
