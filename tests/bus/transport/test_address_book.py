"""Tests: the address book of a cluster determines routes, unknown processes and departed processes."""

import asyncio
import sys
from pathlib import Path

import pytest

from asterism.bus.lanes import BULK, CONTROL, LANES, Lane
from asterism.bus.messages import LeaseReleased
from asterism.bus.transport.address_book import (
    AddressBook,
    AddressEntry,
    Network,
    TcpAddress,
    load_network,
    write_address_book,
    write_key_location,
)
from asterism.bus.transport.curve_auth import KEY_FILE, ClusterKey, generate_key, load_key
from asterism.bus.transport.zeromq import get_socket_path
from asterism.configs.errors import UnusableInput
from tests.bus.clusters import Cluster
from tests.bus.networks import call, receive_numbers, send_calls, wait_until

pytestmark = [pytest.mark.usefixtures("short_waits"), pytest.mark.real_clock, pytest.mark.timeout(30)]


@pytest.fixture
def key(tmp_path: Path) -> ClusterKey:
    return load_key(generate_key(tmp_path / "keys"))


@pytest.fixture
def cluster(tmp_path: Path, key: ClusterKey) -> Cluster:
    """Return a cluster with a and b on node 0, and c on node 1."""
    cluster = Cluster(tmp_path, key)
    cluster.add(0, "a", "b")
    cluster.add(1, "c")
    return cluster


async def rounds(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# ---------------------------------------------------------------- routes


async def test_peers_of_the_same_node_are_reached_without_tcp(cluster: Cluster) -> None:
    """No process listens on the TCP ports in the sender's book."""
    b = cluster.join("b")
    cluster.add(0, "b")
    a = cluster.join("a")
    await send_calls(a, "b", 3)
    assert await receive_numbers(b, 3) == [0, 1, 2]


async def test_peers_of_another_node_are_reached_without_their_ipc_sockets(cluster: Cluster) -> None:
    a, c = cluster.join("a"), cluster.join("c")
    for lane in LANES:
        get_socket_path(cluster.get_sockets(1), "c", lane).unlink()
    await a.send("c", call(7))
    await a.send("c", LeaseReleased(7, 5))
    assert {type((await c.receive()).message).__name__ for _ in range(2)} == {"CodeRequested", "LeaseReleased"}


RECEIVER = """
import asyncio, sys
from pathlib import Path
from asterism.bus.transport.address_book import load_network
from asterism.bus.transport.zeromq import open_zmq_bus

async def live(sockets):
    bus = open_zmq_bus("c", sockets, 1000, 1, load_network(sockets))
    deliveries = [await bus.receive_delivery() for _ in range(5)]
    bus.acknowledge(deliveries[1])
    await asyncio.Event().wait()

asyncio.run(live(Path(sys.argv[1])))
"""


@pytest.mark.slow
async def test_a_new_incarnation_on_the_same_ports_gets_unacknowledged_frames(tmp_path: Path, cluster: Cluster) -> None:
    write_key_location(cluster.get_sockets(1), tmp_path / "keys" / KEY_FILE)
    a = cluster.join("a")
    await send_calls(a, "c", 5)
    first = await asyncio.create_subprocess_exec(sys.executable, "-c", RECEIVER, str(cluster.get_sockets(1)))
    await wait_until(lambda: a.unacknowledged == {"c": 3})
    first.kill()
    await first.wait()
    await send_calls(a, "c", 5, first=5)
    c = cluster.join("c", epoch=2)
    assert await receive_numbers(c, 8) == list(range(2, 10))
    assert (a.dropped, c.dropped) == (0, 0)


# ---------------------------------------------------------------- unknown processes


async def test_frames_wait_until_their_receiver_is_in_the_book(cluster: Cluster) -> None:
    a = cluster.join("a")
    await send_calls(a, "d", 20)
    await a.send("d", LeaseReleased(7, 5))
    await rounds()
    a._transport.probe("d")  # pyright: ignore
    assert a.unacknowledged == {"d": 21}
    cluster.add(1, "d")
    d = cluster.join("d")
    received = [(await d.receive()).message for _ in range(21)]
    assert [one for one in received if one != LeaseReleased(7, 5)] == [call(number) for number in range(20)]
    await wait_until(lambda: not a.unacknowledged)
    assert (a.dropped, d.dropped) == (0, 0)


async def test_a_process_acknowledges_frames_of_a_sender_without_a_book_entry(cluster: Cluster) -> None:
    """The acknowledgements return on the connection that delivered the frames."""
    a = cluster.join("a")
    network = write_book_without(cluster, "a", node=1)
    c = cluster.join("c", network=network)
    await a.send("c", call(1))
    assert await receive_numbers(c, 1) == [1]
    await wait_until(lambda: not a.unacknowledged)


def write_book_without(cluster: Cluster, process: str, node: int) -> Network:
    entries = {name: entry for name, entry in cluster.entries.items() if name != process}
    write_address_book(cluster.get_sockets(node), AddressBook(node, entries, []))
    return cluster.network(node)


# ---------------------------------------------------------------- departed processes


@pytest.mark.parametrize("peer", ["c", "d"])
async def test_blocked_senders_are_released_when_the_peer_departs(cluster: Cluster, peer: str) -> None:
    """The peer is tested with and without an address in the book."""
    a = cluster.join("a", bound=4)
    sending = [asyncio.create_task(send_calls(a, peer, 10)) for _ in range(3)]
    await wait_until(lambda: a.unacknowledged == {peer: 4})
    assert not any(each.done() for each in sending)
    cluster.remove(peer)
    await asyncio.gather(*sending)
    assert (a.unacknowledged, a.dropped) == ({}, 30)
    await a.send(peer, LeaseReleased(1, 5))
    assert (a.unacknowledged, a.dropped) == ({}, 31)


@pytest.mark.slow
async def test_frames_from_a_departed_process_are_dropped_and_counted(cluster: Cluster) -> None:
    network = cluster.network(0)
    a, b, c = cluster.join("a", network=network), cluster.join("b"), cluster.join("c")
    await c.send("a", call(1))
    assert await receive_numbers(a, 1) == [1]
    await wait_until(lambda: not c.unacknowledged)
    cluster.remove("c")
    assert network.refresh()
    await c.send("a", call(2))
    await wait_until(lambda: a.dropped > 0)
    await b.send("a", call(3))
    assert await receive_numbers(a, 1) == [3]
    assert (a.waiting, c.unacknowledged) == (0, {"a": 1})


async def test_restored_frames_for_a_departed_process_are_dropped(cluster: Cluster) -> None:
    cluster.remove("c")
    a = cluster.join("a")
    a.restore({("c", BULK): (9, [b"x", b"y"])}, {("c", CONTROL): (0, 4)})
    assert (a.unacknowledged, a.dropped) == ({}, 2)


@pytest.mark.slow
async def test_frames_of_an_earlier_launch_are_dropped_and_counted(cluster: Cluster) -> None:
    """Process c continues on a disconnected node. Process b has epoch 0, which is always accepted."""
    cluster.first_epoch = 2_000
    cluster.add(0, "d")
    a, b, c, d = cluster.join("a", 2_000), cluster.join("b"), cluster.join("c", 1_001), cluster.join("d", 2_001)
    await c.send("a", call(1))
    await wait_until(lambda: a.dropped > 0)
    for sender, number in ((b, 2), (d, 3)):
        await sender.send("a", call(number))
        assert await receive_numbers(a, 1) == [number]
    assert (a.waiting, c.unacknowledged) == (0, {"a": 1})


# ---------------------------------------------------------------- the file


def test_a_changed_book_is_read_again(tmp_path: Path, key: ClusterKey) -> None:
    here, there = AddressEntry(TcpAddress("10.0.0.1", 29700), 0), AddressEntry(TcpAddress("10.0.0.2", 29702), 1)
    write_address_book(tmp_path, AddressBook(0, {"a": here}, []))
    network, changes = Network(key, tmp_path), list[frozenset[str]]()
    network.change_callbacks.append(lambda: changes.append(network.departed))
    assert not network.refresh()
    assert (network.find_entry("a"), network.find_entry("b")) == (here, None)
    write_address_book(tmp_path, AddressBook(0, {"a": here, "b": there}, ["a"]))
    assert network.find_entry("b") is None
    assert network.refresh()
    assert (network.find_entry("a"), network.find_entry("b")) == (None, there)
    assert (changes, network.is_local(here), network.is_local(there)) == ([frozenset("a")], True, False)


def test_the_last_book_stays_valid_after_its_folder_is_deleted(tmp_path: Path, key: ClusterKey) -> None:
    entry = AddressEntry(TcpAddress("10.0.0.1", 29700), 0)
    write_address_book(tmp_path, AddressBook(0, {"a": entry}, []))
    network = Network(key, tmp_path)
    (tmp_path / "book").unlink()
    assert not network.refresh()
    assert network.find_entry("a") == entry


def test_the_bulk_lane_uses_the_port_after_the_control_lane() -> None:
    address = TcpAddress("10.0.0.1", 29700)
    assert (address.format_endpoint(CONTROL), address.format_endpoint(BULK)) == (
        "tcp://10.0.0.1:29700",
        "tcp://10.0.0.1:29701",
    )


def test_a_folder_with_a_key_location_belongs_to_a_cluster(tmp_path: Path) -> None:
    path = generate_key(tmp_path / "keys")
    assert load_network(tmp_path) is None
    write_address_book(tmp_path, AddressBook(3, {}, []))
    write_key_location(tmp_path, path)
    network = load_network(tmp_path)
    assert network is not None
    assert network.key == load_key(path)


@pytest.mark.parametrize("text", [None, "{}", "nonsense"])
def test_a_missing_or_invalid_book_is_refused(tmp_path: Path, key: ClusterKey, text: str | None) -> None:
    if text is not None:
        (tmp_path / "book").write_text(text)
    with pytest.raises(UnusableInput, match="book"):
        Network(key, tmp_path)


def test_a_process_without_an_entry_cannot_listen(cluster: Cluster) -> None:
    cluster.remove("c")
    with pytest.raises(UnusableInput, match="c has no address in the address book"):
        cluster.join("c")


@pytest.mark.parametrize("lane", LANES)
async def test_the_error_for_a_used_port_names_the_port_and_permits_a_retry(cluster: Cluster, lane: Lane) -> None:
    taken = cluster.entries["c"].address
    port = taken.port + (1 if lane == CONTROL else -1)  # the two addresses share one port
    own = TcpAddress(taken.host, port)
    cluster.add(1, "c", address=own)
    cluster.add(1, "d", address=taken)
    d = cluster.join("d")
    with pytest.raises(UnusableInput, match=f"c cannot listen on {own.format_endpoint(lane)}: Address already in use"):
        cluster.join("c")
    await d.close()
    cluster.join("c")
