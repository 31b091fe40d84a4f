"""The ranks of the learner: joining, sharding a model, reductions and broadcasts."""

import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

# Ranks wait in a collective while rollouts are collected. A dead rank is detected by its closed connection.
COLLECTIVE_TIMEOUT = timedelta(days=7)


class RankGroup(NamedTuple):
    """This process's rank. With a world size of 1 there is no process group and no collective."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1  # ranks per node

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def node(self) -> int:
        """0: the node of the leading rank."""
        return self.rank // self.local_world_size


def join_ranks() -> RankGroup:
    """Read the rank from the environment that torchrun sets; without it, a single rank."""
    names = ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)
    ranks = RankGroup(*(int(os.environ.get(name, default)) for name, default in names))
    if ranks.world_size > 1:
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    return ranks


def leave_ranks(ranks: RankGroup) -> None:
    """The last call of a rank. One of several ranks ends here, with exit code 0.

    gloo keeps threads, which abort about 1 of 100 processes if the interpreter ends in the usual way.
    """
    if ranks.world_size > 1:
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def shard_model(model: nn.Module, layers: Iterable[nn.Module], ranks: RankGroup) -> None:
    """Shard the parameters over the ranks, layer by layer (FSDP2). Every rank must hold the same values.

    Gradients are summed over ranks, not averaged: the loss is already divided by the tokens of the whole minibatch.
    """
    if ranks.world_size == 1:
        return
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    for module in (*layers, model):
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        assert isinstance(sharded, FSDPModule)


def reshard_root(model: nn.Module) -> None:
    """Free the root's gathered parameters after a forward pass that no backward pass follows."""
    if isinstance(model, FSDPModule):
        model.reshard()


def gather_full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; a collective if the tensor is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """All parameters by name, gathered and detached. Every rank must call it."""
    return {name: gather_full(parameter.detach()) for name, parameter in model.named_parameters()}


def find_non_finite_parameter(model: nn.Module, ranks: RankGroup) -> str | None:
    """The name of the first parameter with an infinity or a NaN. Every rank must call it."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    local = [each.to_local() if isinstance(each, DTensor) else each for each in parameters]
    has_non_finite = torch.stack([(~each.detach().isfinite()).any() for each in local]).int()
    found = all_reduce(ranks, has_non_finite, dist.ReduceOp.MAX).tolist()
    return next((name for name, is_bad in zip(names, found, strict=True) if is_bad), None)


def all_reduce(ranks: RankGroup, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if ranks.world_size > 1:
        dist.all_reduce(values, operation)
    return values


def broadcast_object(ranks: RankGroup, item: Any = None) -> Any:
    """Returns the leading rank's `item` on every rank."""
    if ranks.world_size == 1:
        return item
    items = [item]
    dist.broadcast_object_list(items, src=0)
    return items[0]


def wait_at_barrier(ranks: RankGroup) -> None:
    if ranks.world_size > 1:
        dist.barrier()
