"""Membership of nodes: between the launcher on node 0 and the launchers of joined nodes."""

import msgspec

from asterism.bus.messages.message import Message


class Listener(msgspec.Struct, frozen=True, array_like=True):
    """A process of the cluster and its address."""

    process: str
    node: int
    host: str
    port: int


class JoinRequested(Message, frozen=True):
    """node -> launcher: the node asks to join."""

    node: str  # process name of its launcher, unique for all time
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
    departed: tuple[str, ...]  # processes


class NodeHeartbeat(Message, frozen=True):
    """launcher <-> node, every heartbeat."""


class NodeLeft(Message, frozen=True):
    """node -> launcher: the node has ended its processes, or is about to."""

    cause: str


class ProcessEnded(Message, frozen=True):
    """node -> launcher: this incarnation of one of its processes has ended."""

    process: str
    incarnation: int
    cause: str


class LearnerRanksRequested(Message, frozen=True):
    """launcher -> node: run ranks of this incarnation of the learner, and stop earlier ranks."""

    incarnation: int
    step: int
    node_rank: int
    num_nodes: int
    host: str  # of the rendezvous
    port: int


ClusterMessage = (
    JoinRequested | JoinAccepted | MembershipChanged | NodeHeartbeat | NodeLeft | ProcessEnded | LearnerRanksRequested
)
