"""Which of a cluster's nodes a process is, as torchrun, Slurm's srun or a Kubernetes indexed job tell it by its environment.

Where several of them apply, the innermost counts: torchrun may run under srun, and srun in a pod. Whoever is alone is
placed by nobody: a step of one task may be a shell (`srun --pty bash`, `salloc`), and an index may be that of a sweep.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from configs.errors import UnusableInput

_RANGES = r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"  # [03-07,09], of which 03 is the first
_FIRST_NODE = re.compile(rf"((?:[^\[\],\s]|{_RANGES})+)(?:,|$)")


class Place(NamedTuple):
    rank: int
    nodes: int  # at least two
    head: str  # host name or address of rank 0
    by: Literal["torchrun", "srun", "kubernetes"]


def place_of(environment: Mapping[str, str]) -> Place | None:
    """None for a process that is alone. Raises UnusableInput for an environment that places several on one node, or nowhere."""
    if "TORCHELASTIC_RUN_ID" in environment:
        place = _by_torchrun(environment)
    elif "SLURM_STEP_ID" in environment:  # a batch script and a plain shell have SLURM_PROCID too, but no step
        place = _by_srun(environment)
    elif "JOB_COMPLETION_INDEX" in environment:
        place = _by_kubernetes(environment)
    else:
        return None
    if place.nodes == 1:
        return None
    if not place.rank < place.nodes:
        raise UnusableInput(f"{place.by}: this process is number {place.rank}, from 0, of {place.nodes}")
    if not place.head:
        raise UnusableInput(f"{place.by}: the host of rank 0 has no name")
    return place


def _by_torchrun(environment: Mapping[str, str]) -> Place:
    rank, nodes = _number(environment, "GROUP_RANK"), _count(environment, "GROUP_WORLD_SIZE")
    local, everywhere = _count(environment, "LOCAL_WORLD_SIZE"), _count(environment, "WORLD_SIZE")
    if local != 1 or everywhere != nodes:
        raise UnusableInput(
            f"torchrun started {everywhere} processes on {nodes} nodes, {local} of them here; "
            "there is one asterism a node, which starts the others: torchrun --nproc-per-node 1"
        )
    return Place(rank, nodes, _text(environment, "MASTER_ADDR"), "torchrun")


def _by_srun(environment: Mapping[str, str]) -> Place:
    """By the step's own variables: SLURM_NTASKS and SLURM_NODELIST may be those of the whole job."""
    rank, tasks = _number(environment, "SLURM_PROCID"), _count(environment, "SLURM_STEP_NUM_TASKS")
    nodes = _count(environment, "SLURM_STEP_NUM_NODES")
    if tasks != nodes:
        raise UnusableInput(
            f"srun started {tasks} tasks on {nodes} nodes; "
            "there is one asterism a node, which starts the others: srun --ntasks-per-node=1"
        )
    return Place(rank, nodes, first_node(_text(environment, "SLURM_STEP_NODELIST")), "srun")


def _by_kubernetes(environment: Mapping[str, str]) -> Place:
    """A pod knows its index; how many there are, and the host name of pod 0, the manifest has to tell it."""
    rank, nodes = _number(environment, "JOB_COMPLETION_INDEX"), _count(environment, "ASTERISM_NODES")
    head = _text(environment, "ASTERISM_HEAD") if nodes > 1 else ""
    return Place(rank, nodes, head, "kubernetes")


def first_node(nodes: str) -> str:
    """`rack2node03` of Slurm's `rack[2,4]node[03-07,09],gpu1`. Raises UnusableInput for what is no list of nodes."""
    first = _FIRST_NODE.match(nodes)
    if first is None:
        raise UnusableInput(f"SLURM_STEP_NODELIST={nodes}: expected a list of nodes, such as node[03-07,09],gpu1")
    return re.sub(_RANGES, r"\1", first[1])


_REMEDIES = {
    "ASTERISM_NODES": "the manifest sets it to .spec.completions, or to 1 if each pod is a run by itself: docs/cluster.md",
    "ASTERISM_HEAD": "the manifest sets it to the host name of pod 0, JOB-0.SERVICE: docs/cluster.md",
}


def _text(environment: Mapping[str, str], name: str) -> str:
    if name not in environment:
        raise UnusableInput(
            f"{name} is missing from the environment; {_REMEDIES.get(name, 'others of its launcher are there')}"
        )
    return environment[name]


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _text(environment, name)
    if not re.fullmatch("[0-9]{1,9}", text):
        raise UnusableInput(f"{name}={text}: expected a number")
    return int(text)


def _count(environment: Mapping[str, str], name: str) -> int:
    number = _number(environment, name)
    if number == 0:
        raise UnusableInput(f"{name}=0: expected a positive number")
    return number
