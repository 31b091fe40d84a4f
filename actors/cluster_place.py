"""Which node of its cluster this `asterism run` is: node 0, which runs the recipe, or one that joins it."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from actors.hosts import host_address
from actors.node import Joining
from bus.book import Address
from configs.errors import UnusableInput
from configs.placement import Place
from configs.schema import Run

_OUTSIDE = "192.0.2.1"  # a host of nobody (RFC 5737): the way there begins at the address that others most likely see


def of_node_0(run: Run, place: Place | None) -> Run:
    """With an address for others, and as many nodes as have been started. Raises UnusableInput where none can be found."""
    cluster = run.cluster
    if place is not None:
        _need_key(run, place)
        cluster = replace(cluster, nodes=place.nodes)
    if cluster.key and not cluster.host:
        towards = _OUTSIDE if place is None else place.head
        cluster = replace(cluster, host=host_address(towards, cluster.port))
    return replace(run, cluster=cluster)


def of_another(run: Run, place: Place) -> Joining:
    """Raises UnusableInput where this host knows of no way to node 0."""
    cluster = run.cluster
    _need_key(run, place)
    head = cluster.host or place.head
    at = Address(head, cluster.port)
    return Joining(at, Address(host_address(head, cluster.port), cluster.port), Path(cluster.key))


def _need_key(run: Run, place: Place) -> None:
    if not run.cluster.key:
        raise UnusableInput(
            f"cluster.key: {place.by} started {place.nodes} nodes; name a file that `asterism keys` made"
        )
