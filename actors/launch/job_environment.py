"""The environment of torchrun, Slurm's srun or a Kubernetes indexed job has this node's rank in its cluster.

Of several launchers, the innermost counts: torchrun can run under srun, srun in a pod. A job with one task is not a
cluster: the task may be a shell (`srun --pty bash`, `salloc`), and the index may number a sweep.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec.structs import replace

from asterism.actors.launch.host_address import find_host_address
from asterism.actors.launch.join_handshake import JoinOptions
from asterism.bus.transport.address_book import TcpAddress
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.run_config import RunConfig

_RANGES = r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"  # [03-07,09], in which 03 is the first
_FIRST_NODE = re.compile(rf"((?:[^\[\],\s]|{_RANGES})+)(?:,|$)")


class NodePlacement(NamedTuple):
    rank: int
    num_nodes: int  # at least 2
    head: str  # host name or address of rank 0
    started_by: Literal["torchrun", "srun", "kubernetes"]


def read_placement(environment: Mapping[str, str]) -> NodePlacement | None:
    """Return the placement, or None for a single process. Raises UnusableInput: a shared node or an invalid rank."""
    if "TORCHELASTIC_RUN_ID" in environment:
        place = _read_torchrun(environment)
    elif "SLURM_STEP_ID" in environment:  # a batch script and a plain shell have SLURM_PROCID too, but no step
        place = _read_srun(environment)
    elif "JOB_COMPLETION_INDEX" in environment:
        place = _read_kubernetes(environment)
    else:
        return None
    if place.num_nodes == 1:
        return None
    if not place.rank < place.num_nodes:
        raise UnusableInput(f"{place.started_by}: rank {place.rank} is out of range for {place.num_nodes} nodes")
    if not place.head:
        raise UnusableInput(f"{place.started_by}: the host of rank 0 has no name")
    return place


def _read_torchrun(environment: Mapping[str, str]) -> NodePlacement:
    rank, nodes = _read_number(environment, "GROUP_RANK"), _read_positive(environment, "GROUP_WORLD_SIZE")
    local, everywhere = _read_positive(environment, "LOCAL_WORLD_SIZE"), _read_positive(environment, "WORLD_SIZE")
    if local != 1 or everywhere != nodes:
        raise UnusableInput(
            f"torchrun started {everywhere} processes on {nodes} nodes, {local} of them here; "
            "start one asterism process per node, which starts the others: torchrun --nproc-per-node 1"
        )
    return NodePlacement(rank, nodes, _read_variable(environment, "MASTER_ADDR"), "torchrun")


def _read_srun(environment: Mapping[str, str]) -> NodePlacement:
    """Read the step's variables, since SLURM_NTASKS and SLURM_NODELIST may describe the whole job."""
    rank, tasks = _read_number(environment, "SLURM_PROCID"), _read_positive(environment, "SLURM_STEP_NUM_TASKS")
    nodes = _read_positive(environment, "SLURM_STEP_NUM_NODES")
    if tasks != nodes:
        raise UnusableInput(
            f"srun started {tasks} tasks on {nodes} nodes; "
            "start one asterism process per node, which starts the others: srun --ntasks-per-node=1"
        )
    return NodePlacement(rank, nodes, parse_first_node(_read_variable(environment, "SLURM_STEP_NODELIST")), "srun")


def _read_kubernetes(environment: Mapping[str, str]) -> NodePlacement:
    """Read the index, which Kubernetes sets, and from the manifest the number of nodes and pod 0's host name."""
    rank, nodes = _read_number(environment, "JOB_COMPLETION_INDEX"), _read_positive(environment, "ASTERISM_NODES")
    head = _read_variable(environment, "ASTERISM_HEAD") if nodes > 1 else ""
    return NodePlacement(rank, nodes, head, "kubernetes")


def parse_first_node(node_list: str) -> str:
    """Return `rack2node03` for Slurm's `rack[2,4]node[03-07,09],gpu1`. Raises UnusableInput for an invalid list."""
    first = _FIRST_NODE.match(node_list)
    if first is None:
        raise UnusableInput(f"SLURM_STEP_NODELIST={node_list}: expected a list of nodes, such as node[03-07,09],gpu1")
    return re.sub(_RANGES, r"\1", first[1])


_REMEDIES = {
    "ASTERISM_NODES": "set it in the manifest to .spec.completions, or to 1 if each pod is a separate run: docs/cluster.md",
    "ASTERISM_HEAD": "set it in the manifest to the host name of pod 0, JOB-0.SERVICE: docs/cluster.md",
}


def _read_variable(environment: Mapping[str, str], name: str) -> str:
    if name not in environment:
        raise UnusableInput(
            f"{name} is missing from the environment; {_REMEDIES.get(name, 'other variables of its launcher are set')}"
        )
    return environment[name]


def _read_number(environment: Mapping[str, str], name: str) -> int:
    text = _read_variable(environment, name)
    if not re.fullmatch("[0-9]{1,9}", text):
        raise UnusableInput(f"{name}={text}: expected a number")
    return int(text)


def _read_positive(environment: Mapping[str, str], name: str) -> int:
    number = _read_number(environment, name)
    if number == 0:
        raise UnusableInput(f"{name}=0: expected a positive number")
    return number


_PROBE_ADDRESS = "192.0.2.1"  # reserved by RFC 5737; the source address of a route to it is this node's address


def configure_head(run: RunConfig, place: NodePlacement | None) -> RunConfig:
    """Set this node's address and the number of nodes. Raises UnusableInput if no address is found."""
    cluster = run.cluster
    if place is not None:
        _require_key(run, place)
        cluster = replace(cluster, nodes=place.num_nodes)
    if cluster.key and not cluster.host:
        towards = _PROBE_ADDRESS if place is None else place.head
        cluster = replace(cluster, host=find_host_address(towards, cluster.port))
    return replace(run, cluster=cluster)


def configure_worker(run: RunConfig, place: NodePlacement) -> JoinOptions:
    """Return how this node joins node 0. Raises UnusableInput if this host has no route to node 0."""
    cluster = run.cluster
    _require_key(run, place)
    head = cluster.host or place.head
    at = TcpAddress(head, cluster.port)
    return JoinOptions(at, TcpAddress(find_host_address(head, cluster.port), cluster.port), Path(cluster.key))


def _require_key(run: RunConfig, place: NodePlacement) -> None:
    if not run.cluster.key:
        raise UnusableInput(
            f"cluster.key: {place.started_by} started {place.num_nodes} nodes; set cluster.key to a file made by `asterism keys`"
        )
