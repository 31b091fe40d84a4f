"""The ranks of the learner: device, device mesh, process groups, reductions and broadcasts.

Three groups contain all ranks. The control group (gloo) broadcasts objects and waits at barriers, while rollouts are
collected. The tensor group (NCCL on GPUs) and the dimensions of the mesh reduce and gather tensors; their collectives
time out after `learner.collective_timeout_s`, because all ranks start them at about the same time. The checkpoint group
(gloo) serves the background threads that write checkpoints.

A single rank has neither groups nor a mesh, unless FSDP offloads its optimizer. In bfloat16 its layers convert the
float32 parameters, as FSDP with several ranks does before a gather. torch.autocast would keep the residual stream in
float32, so that one rank and two ranks would compute different losses.
"""

import math
import os
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from asterism.bus.process.operations import OperationRecord
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.learner_config import LearnerConfig

# Ranks wait in a broadcast while rollouts are collected. A dead rank is detected by its closed connection.
CONTROL_TIMEOUT = timedelta(days=7)
CHECKPOINT_TIMEOUT = timedelta(hours=1)  # ranks wait until the slowest rank has written its part

# gloo's RuntimeError: "[/.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:53155. This is ..."
_GLOO_ERROR = re.compile(r"\[\S*/gloo/\S+\] (.+?)(?:\. |$)|(Application timeout caused pair closure)")


class CollectiveFailed(Exception):
    """A timeout of a collective, or the loss of a rank: an outage. The text has rank, operations and durations."""


class ParallelDims(NamedTuple):
    """The sizes of the device mesh, outermost dimension first. Ranks that differ only in cp or tp have equal rows."""

    dp_replicate: int = 1  # number of copies of the model
    dp_shard: int = 1  # ranks that share the parameters of one copy
    cp: int = 1  # ranks that share each sequence; always 1
    tp: int = 1  # ranks that share each matrix product; always 1

    @property
    def num_data_ranks(self) -> int:
        """The number of shares of a minibatch."""
        return self.dp_replicate * self.dp_shard


def compute_parallel_dims(num_ranks: int, dp_replicate: int) -> ParallelDims:
    """Compute the mesh's sizes. Raises UnusableInput if the copies cannot be equal parts of the ranks."""
    if num_ranks % dp_replicate:
        raise UnusableInput(
            f"learner.dp_replicate = {dp_replicate} must divide the number of ranks, learner.ranks on each of "
            f"cluster.learner_nodes nodes: {num_ranks}"
        )
    return ParallelDims(dp_replicate, num_ranks // dp_replicate)


class RankGroup(NamedTuple):
    """The rank of this process and its groups. Without a mesh there is no process group and no collective."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1  # number of ranks per node
    dims: ParallelDims = ParallelDims()
    device: torch.device = torch.device("cpu")
    mesh: DeviceMesh | None = None  # 4-D, with the names of ParallelDims
    tensor_group: ProcessGroup | None = None  # group of all ranks
    operations: OperationRecord = OperationRecord()  # operations of this process
    checkpoint_group: ProcessGroup | None = (
        None  # exists with several ranks, for asterism.engine.learner.checkpoints.checkpoint_folders
    )
    offloads_optimizer: bool = False  # whether learner.memory.offload is "optimizer"

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def state_device(self) -> torch.device:
        """The device of weights, gradients and moments."""
        return torch.device("cpu") if self.offloads_optimizer else self.device

    @property
    def node(self) -> int:
        """The number of this rank's node; 0 is the node of the leading rank."""
        return self.rank // self.local_world_size

    @property
    def data_rank(self) -> int:
        """The number of this rank's share of a minibatch, below `dims.num_data_ranks`."""
        return self.find_data_rank(self.rank)

    def find_data_rank(self, rank: int) -> int:
        return rank // (self.dims.cp * self.dims.tp)

    @property
    def parameter_mesh(self) -> DeviceMesh:
        """The dimensions over which parameters are replicated and sharded."""
        assert self.mesh is not None, "a single rank without a mesh has whole parameters"
        return self.mesh["dp_replicate", "dp_shard"] if self.dims.dp_replicate > 1 else self.mesh["dp_shard"]

    def operation(self, name: str, *, is_limited: bool = True) -> AbstractContextManager[None]:
        """Record that this rank runs the operation `name` while the context is open, in any thread.

        The rank's heartbeats contain the operation. If it takes longer than `learner.collective_timeout_s`, the
        launcher restarts the learner, unless `is_limited` is False, as for operations that wait for rollouts or contain
        other operations.
        """
        return self.operations.run(name, is_limited=is_limited)

    def select_device(self) -> None:
        """Make this rank's GPU the current device of the calling thread. Every thread that trains calls it first."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)


def read_rank() -> tuple[int, int]:
    """Read the rank of this process and the number of ranks from torchrun's environment, or return (0, 1)."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def join_ranks(learner: LearnerConfig) -> RankGroup:
    """Join the ranks of torchrun's environment, or return a single rank without it. Raises UnusableInput."""
    (rank, world_size), local_world_size = read_rank(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    dims = compute_parallel_dims(world_size, learner.dp_replicate)
    ranks = RankGroup(rank, world_size, local_world_size, dims, _find_device(learner.device))
    ranks.select_device()
    offloads_optimizer = learner.memory.offload == "optimizer"  # FSDP offloads the optimizer
    if world_size == 1 and not offloads_optimizer:
        return ranks
    ranks = ranks._replace(offloads_optimizer=offloads_optimizer)
    alone: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1} if world_size == 1 else {}
    dist.init_process_group("gloo", timeout=CONTROL_TIMEOUT, **alone)
    return _with_mesh(ranks, timedelta(seconds=learner.collective_timeout_s))


def _find_device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    index, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= num_gpus:
        raise UnusableInput(
            f'learner.device = "cuda" needs a GPU for each of learner.ranks: rank {index} of this node finds {num_gpus}; '
            'lower learner.ranks, or set learner.device = "cpu"'
        )
    return torch.device("cuda", index)


def _with_mesh(ranks: RankGroup, timeout: timedelta) -> RankGroup:
    """Every rank creates the same groups in the same order. Dimensions with the same ranks share a group."""
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    if ranks.offloads_optimizer:  # the norm of the gradients is reduced in main memory
        backend = f"cpu:gloo,cuda:{backend}"
    ids = torch.arange(ranks.world_size).reshape(ranks.dims)
    groups: dict[tuple[tuple[int, ...], ...], ProcessGroup] = {}

    def join_group(partition: list[list[int]]) -> ProcessGroup:
        """Return the group of `partition` that contains this rank."""
        key = tuple(tuple(members) for members in partition)
        if key not in groups:
            group, _ = dist.new_subgroups_by_enumeration(partition, timeout, backend)
            assert isinstance(group, ProcessGroup)
            groups[key] = group
        return groups[key]

    tensor_group = join_group([list(range(ranks.world_size))])
    by_dim = [join_group(ids.movedim(dim, -1).reshape(-1, size).tolist()) for dim, size in enumerate(ranks.dims)]
    mesh = DeviceMesh.from_group(by_dim, ranks.device.type, ids, mesh_dim_names=ParallelDims._fields)
    checkpoint_group = dist.new_group(timeout=CHECKPOINT_TIMEOUT, backend="gloo") if ranks.world_size > 1 else None
    assert isinstance(checkpoint_group, ProcessGroup | None)
    return ranks._replace(mesh=mesh, tensor_group=tensor_group, checkpoint_group=checkpoint_group)


def leave_ranks(ranks: RankGroup) -> None:
    """Leave the process group as the last call of a rank. A rank with a group exits here with code 0.

    gloo keeps threads, which abort about 1 of 100 processes if the interpreter exits normally.
    """
    if ranks.mesh is not None:
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@contextmanager
def naming_failed_collectives(rank: int, operations: OperationRecord) -> Generator[None]:
    """Raise CollectiveFailed for errors of gloo and NCCL, with the operations that were running."""
    try:
        yield
    except RuntimeError as error:
        match = _GLOO_ERROR.search(str(error))
        if match is None and not isinstance(error, dist.DistError):
            raise
        cause = str(error) if match is None else match[1] or match[2]
        where = f", {operations.failed}" if operations.failed else ""
        raise CollectiveFailed(f"learner rank {rank}{where}: {cause}") from error


def gather_full(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank. For a sharded tensor this is a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def get_local(parameter: Tensor) -> Tensor:
    """Return the rows of this rank, detached."""
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def gather_full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Gather all parameters by name, detached and in main memory. Every rank must call it."""
    return {name: gather_full(parameter.detach()).cpu() for name, parameter in model.named_parameters()}


def find_non_finite_parameter(model: nn.Module, ranks: RankGroup) -> str | None:
    """Return the name of the first parameter with an infinity or a NaN, or None. Every rank must call it.

    One pass computes the largest absolute value of all parameters. Only if it is not finite, each parameter is checked.
    """
    rows = {name: get_local(each) for name, each in model.named_parameters()}
    largest = get_total_norm([each for each in rows.values() if each.numel()], math.inf)
    if not _find_on_any_rank(ranks, [~largest.isfinite()]):
        return None
    found = _find_on_any_rank(ranks, [(~each.isfinite()).any() for each in rows.values()])
    return list(rows)[found[0]] if found else None


def _find_on_any_rank(ranks: RankGroup, flags: Sequence[Tensor]) -> list[int]:
    """Return the indices of the flags, boolean scalars, that are set on any rank."""
    counts = torch.stack([flag.int() for flag in flags]).to(ranks.device)
    return [index for index, count in enumerate(all_reduce(ranks, counts, dist.ReduceOp.MAX).tolist()) if count]


def all_reduce(ranks: RankGroup, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """Reduce `values`, on the device of the ranks, in place over all ranks."""
    if ranks.tensor_group is not None:
        with ranks.operation("reduction"):
            dist.all_reduce(values, operation, ranks.tensor_group)
    return values


def broadcast_object(ranks: RankGroup, item: Any = None) -> Any:
    """Return the leading rank's `item` on every rank."""
    if ranks.world_size == 1:
        return item
    items = [item]
    with ranks.operation("broadcast of rank 0", is_limited=False):
        dist.broadcast_object_list(items, src=0)
    return items[0]


def wait_at_barrier(ranks: RankGroup) -> None:
    if ranks.world_size > 1:
        with ranks.operation("barrier"):
            dist.barrier()
