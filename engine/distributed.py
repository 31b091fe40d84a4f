"""The ranks of the learner: joining, sharding a model, adding up, and one rank telling the others what comes next."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

# Ranks wait in a collective while rollouts are collected, however long. A dead rank is noticed by its closed connection.
PATIENCE = timedelta(days=7)


class Ranks(NamedTuple):
    """This process among those that train together. With size 1 there is no process group and no collective."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0


def join_ranks() -> Ranks:
    """From the environment that torch's elastic launcher sets; without it, a single rank."""
    ranks = Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    if ranks.size > 1:
        dist.init_process_group("gloo", timeout=PATIENCE)
    return ranks


def leave_ranks(ranks: Ranks) -> None:
    if ranks.size > 1:
        dist.destroy_process_group()


def shard(model: nn.Module, layers: Iterable[nn.Module], ranks: Ranks) -> None:
    """Spread the parameters over the ranks, layer by layer (FSDP2). Every rank must hold the same values.

    Gradients are summed over ranks, not averaged: a loss is already divided by the whole minibatch's tokens.
    """
    if ranks.size == 1:
        return
    mesh = init_device_mesh("cpu", (ranks.size,))
    for module in (*layers, model):
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        assert isinstance(sharded, FSDPModule)


def whole(tensor: Tensor) -> Tensor:
    """The tensor with all ranks' shards, on every rank; a collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """All parameters by name, gathered and detached. Every rank must call it."""
    return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


def sum_over(ranks: Ranks, values: Tensor) -> Tensor:
    if ranks.size > 1:
        dist.all_reduce(values, dist.ReduceOp.SUM)
    return values


def max_over(ranks: Ranks, values: Tensor) -> Tensor:
    if ranks.size > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def from_leader(ranks: Ranks, item: Any = None) -> Any:
    """What the leading rank passes, on every rank."""
    if ranks.size == 1:
        return item
    items = [item]
    dist.broadcast_object_list(items, src=0)
    return items[0]


def wait_for_all(ranks: Ranks) -> None:
    if ranks.size > 1:
        dist.barrier()
