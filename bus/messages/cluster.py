"""Membership of nodes: messages between the launcher on node 0 and the launchers of joined nodes."""

import msgspec

from asterism.bus.messages.message import Message


class Listener(msgspec.Struct, frozen=True, array_like=True):
    """A process of the cluster and its address."""

    process: str
    node: int
    host: str
    port: int


class JoinRequested(Message, frozen=True):
    """node -> launcher: request to join."""

    node: str  # process name of the node's launcher, which is never used again
    host: str
    port: int
    generators: int  # number of generators to run; -1: as configured
    executors: int


class JoinAccepted(Message, frozen=True):
    """launcher -> node: the node has joined, with this number."""

    node_number: int
    launch: int
    run_folder: str
    generators: tuple[str, ...]  # names of the processes that the node must run
    executors: tuple[str, ...]
    listeners: tuple[Listener, ...]  # all processes of the cluster


class MembershipChanged(Message, frozen=True):
    """launcher -> node: processes have joined, or have departed and will not return."""

    joined: tuple[Listener, ...]
    departed: tuple[str, ...]  # names of departed processes


class NodeHeartbeat(Message, frozen=True):
    """node <-> launcher: a heartbeat, at every heartbeat interval."""


class NodeLeft(Message, frozen=True):
    """node -> launcher: the node has ended its processes, or is ending them."""

    cause: str


class ProcessEnded(Message, frozen=True):
    """node -> launcher: this incarnation of a process of the node has ended."""

    process: str
    incarnation: int
    cause: str


class LearnerRanksRequested(Message, frozen=True):
    """launcher -> node: run ranks of this incarnation of the learner, and stop earlier ranks."""

    incarnation: int
    step: int
    node_rank: int
    num_nodes: int
    host: str  # host of the rendezvous
    port: int


ClusterMessage = (
    JoinRequested | JoinAccepted | MembershipChanged | NodeHeartbeat | NodeLeft | ProcessEnded | LearnerRanksRequested
)
