"""A run's nodes: between its launcher, which is the first node's, and those of further nodes, which come and go."""

from __future__ import annotations

import msgspec

from bus.messages.message import Message


class Listener(msgspec.Struct, frozen=True, array_like=True):
    """A process of the cluster, and where it listens."""

    process: str
    node: int
    host: str
    port: int


class NodeArrived(Message, frozen=True):
    """node -> launcher: it would take part."""

    node: str  # its launcher's process name, which nobody else has, or has had
    host: str
    port: int
    generators: int  # that it would run; -1: as many as the configuration says
    executors: int


class NodeWelcomed(Message, frozen=True):
    """launcher -> node: it takes part, under this number."""

    number: int
    boot: int
    run_folder: str
    generators: tuple[str, ...]  # names of the processes that it is to keep alive
    executors: tuple[str, ...]
    listeners: tuple[Listener, ...]  # all of the cluster


class NodesChanged(Message, frozen=True):
    """launcher -> node: somebody has joined, or is gone for good."""

    joined: tuple[Listener, ...]
    gone: tuple[str, ...]  # processes


class NodeBeat(Message, frozen=True):
    """launcher <-> node, every heartbeat."""


class NodeLeft(Message, frozen=True):
    """node -> launcher: it has ended its processes, or is about to."""

    cause: str


class ProcessEnded(Message, frozen=True):
    """node -> launcher: this life of one of its processes is over."""

    process: str
    life: int
    cause: str


class LearnerWanted(Message, frozen=True):
    """launcher -> node: run ranks of this life of the learner; those of an earlier life are over."""

    life: int
    step: int
    node_rank: int
    nodes: int
    host: str  # where they meet
    port: int


ClusterMessage = NodeArrived | NodeWelcomed | NodesChanged | NodeBeat | NodeLeft | ProcessEnded | LearnerWanted
