"""A cluster's book: who is reached how, who is waited for, and who will not come back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from bus.book import Address, Book, Entry, Network, network_of, write_book, write_network
from bus.curve import KEY_FILE, ClusterKey, load_key, make_key
from bus.lanes import BULK, CONTROL, LANES, Lane
from bus.messages import LeaseReleased
from bus.transport import Bus
from bus.zeromq import socket_of
from configs.errors import UnusableInput
from tests.bus.clusters import Cluster
from tests.bus.networks import call, until

pytestmark = pytest.mark.usefixtures("short_waits")


@pytest.fixture
def key(tmp_path: Path) -> ClusterKey:
    return load_key(make_key(tmp_path / "keys"))


@pytest.fixture
def cluster(tmp_path: Path, key: ClusterKey) -> Cluster:
    """Two nodes, with a and b on node 0, and c on node 1."""
    cluster = Cluster(tmp_path, key)
    cluster.enter(0, "a", "b")
    cluster.enter(1, "c")
    return cluster


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, timeout=30))


async def send_calls(bus: Bus, to: str, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        await bus.send(to, call(number))


async def numbers_of(bus: Bus, count: int) -> list[int]:
    return [(await bus.receive()).message.trajectory_id for _ in range(count)]  # pyright: ignore


async def rounds(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def close(*buses: Bus) -> None:
    await asyncio.gather(*(bus.close() for bus in buses))


# ---------------------------------------------------------------- who is reached how


def test_peers_of_the_same_node_are_reached_without_tcp(cluster: Cluster) -> None:
    """Nobody listens at the ports that the sender finds in the book."""

    async def scenario() -> None:
        b = cluster.join("b")
        cluster.enter(0, "b")
        a = cluster.join("a")
        await send_calls(a, "b", 3)
        assert await numbers_of(b, 3) == [0, 1, 2]
        await close(a, b)

    run(scenario())


def test_peers_of_another_node_are_reached_without_their_ipc_sockets(cluster: Cluster) -> None:
    async def scenario() -> None:
        a, c = cluster.join("a"), cluster.join("c")
        for lane in LANES:
            socket_of(cluster.sockets(1), "c", lane).unlink()
        await a.send("c", call(7))
        await a.send("c", LeaseReleased(7, 5))
        assert {type((await c.receive()).message).__name__ for _ in range(2)} == {"CodeRequested", "LeaseReleased"}
        await close(a, c)

    run(scenario())


A_LIFE = """
import asyncio, sys
from pathlib import Path
from bus.book import network_of
from bus.zeromq import zmq_bus

async def live(sockets):
    bus = zmq_bus("c", sockets, 1000, 1, network_of(sockets))
    deliveries = [await bus.receive_delivery() for _ in range(5)]
    bus.acknowledge(deliveries[1])
    await asyncio.Event().wait()

asyncio.run(live(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_a_new_life_listens_at_the_ports_of_the_one_that_was_killed_and_gets_what_was_held(
    tmp_path: Path, cluster: Cluster
) -> None:
    async def scenario() -> None:
        write_network(cluster.sockets(1), tmp_path / "keys" / KEY_FILE)
        a = cluster.join("a")
        await send_calls(a, "c", 5)
        first = await asyncio.create_subprocess_exec(sys.executable, "-c", A_LIFE, str(cluster.sockets(1)))
        await until(lambda: a.unacknowledged == {"c": 3})
        first.kill()
        await first.wait()
        await send_calls(a, "c", 5, first=5)
        c = cluster.join("c", session=2)
        assert await numbers_of(c, 8) == list(range(2, 10))
        assert (a.dropped, c.dropped) == (0, 0)
        await close(a, c)

    run(scenario())


# ---------------------------------------------------------------- who is not in it yet


def test_who_is_not_in_the_book_yet_gets_everything_once_he_is(cluster: Cluster) -> None:
    async def scenario() -> None:
        a = cluster.join("a")
        await send_calls(a, "d", 20)
        await a.send("d", LeaseReleased(7, 5))
        await rounds()
        a._transport.ask("d")  # pyright: ignore  # as is done when a peer is silent
        assert a.unacknowledged == {"d": 21}
        cluster.enter(1, "d")
        d = cluster.join("d")
        received = [(await d.receive()).message for _ in range(21)]
        assert [one for one in received if one != LeaseReleased(7, 5)] == [call(number) for number in range(20)]
        await until(lambda: not a.unacknowledged)
        assert (a.dropped, d.dropped) == (0, 0)
        await close(a, d)

    run(scenario())


def test_a_process_answers_who_is_not_in_its_book(cluster: Cluster) -> None:
    """Acknowledgements take the connection by which the frames came."""

    async def scenario() -> None:
        a = cluster.join("a")
        network = a_copy_without(cluster, "a", node=1)
        c = cluster.join("c", network=network)
        await a.send("c", call(1))
        assert await numbers_of(c, 1) == [1]
        await until(lambda: not a.unacknowledged)
        await close(a, c)

    run(scenario())


def a_copy_without(cluster: Cluster, process: str, node: int) -> Network:
    entries = {name: entry for name, entry in cluster.entries.items() if name != process}
    write_book(cluster.sockets(node), Book(node, entries, []))
    return cluster.network(node)


# ---------------------------------------------------------------- who is gone


@pytest.mark.parametrize("peer", ["c", "d"])
def test_those_who_wait_for_room_are_let_go_when_the_peer_is_gone(cluster: Cluster, peer: str) -> None:
    """Whether he has an address or never had one."""

    async def scenario() -> None:
        a = cluster.join("a", bound=4)
        sending = [asyncio.create_task(send_calls(a, peer, 10)) for _ in range(3)]
        await until(lambda: a.unacknowledged == {peer: 4})
        assert not any(each.done() for each in sending)
        cluster.lose(peer)
        await asyncio.gather(*sending)
        assert (a.unacknowledged, a.dropped) == ({}, 30)
        await a.send(peer, LeaseReleased(1, 5))
        assert (a.unacknowledged, a.dropped) == ({}, 31)
        await a.close()

    run(scenario())


def test_what_comes_from_who_is_gone_is_dropped_and_counted(cluster: Cluster) -> None:
    async def scenario() -> None:
        network = cluster.network(0)
        a, b, c = cluster.join("a", network=network), cluster.join("b"), cluster.join("c")
        await c.send("a", call(1))
        assert await numbers_of(a, 1) == [1]
        await until(lambda: not c.unacknowledged)
        cluster.lose("c")
        assert network.refresh()
        await c.send("a", call(2))
        await until(lambda: a.dropped > 0)
        await b.send("a", call(3))
        assert await numbers_of(a, 1) == [3]
        assert (a.waiting, c.unacknowledged) == (0, {"a": 1})
        await close(a, b, c)

    run(scenario())


def test_a_process_that_remembers_frames_for_who_is_gone_drops_them(cluster: Cluster) -> None:
    async def scenario() -> None:
        cluster.lose("c")
        a = cluster.join("a")
        a.restore({("c", BULK): (9, [b"x", b"y"])}, {("c", CONTROL): (0, 4)})
        assert (a.unacknowledged, a.dropped) == ({}, 2)
        await a.close()

    run(scenario())


def test_what_comes_from_an_earlier_launch_is_dropped_and_counted(cluster: Cluster) -> None:
    """c's node was cut off and has not ended; b has session 0, in which launches are not counted."""

    async def scenario() -> None:
        cluster.first_session = 2_000
        cluster.enter(0, "d")
        a, b, c, d = cluster.join("a", 2_000), cluster.join("b"), cluster.join("c", 1_001), cluster.join("d", 2_001)
        await c.send("a", call(1))
        await until(lambda: a.dropped > 0)
        for sender, number in ((b, 2), (d, 3)):
            await sender.send("a", call(number))
            assert await numbers_of(a, 1) == [number]
        assert (a.waiting, c.unacknowledged) == (0, {"a": 1})
        await close(a, b, c, d)

    run(scenario())


# ---------------------------------------------------------------- the file


def test_the_book_is_read_again_when_it_has_changed(tmp_path: Path, key: ClusterKey) -> None:
    here, there = Entry(Address("10.0.0.1", 29700), 0), Entry(Address("10.0.0.2", 29702), 1)
    write_book(tmp_path, Book(0, {"a": here}, []))
    network, changes = Network(key, tmp_path), list[frozenset[str]]()
    network.watchers.append(lambda: changes.append(network.gone))
    assert not network.refresh()
    assert (network.entry("a"), network.entry("b")) == (here, None)
    write_book(tmp_path, Book(0, {"a": here, "b": there}, ["a"]))
    assert network.entry("b") is None
    assert network.refresh()
    assert (network.entry("a"), network.entry("b")) == (None, there)  # whoever is gone has no address any more
    assert (changes, network.is_near(here), network.is_near(there)) == ([frozenset("a")], True, False)


def test_what_was_known_stays_when_the_folder_is_gone(tmp_path: Path, key: ClusterKey) -> None:
    entry = Entry(Address("10.0.0.1", 29700), 0)
    write_book(tmp_path, Book(0, {"a": entry}, []))
    network = Network(key, tmp_path)
    (tmp_path / "book").unlink()
    assert not network.refresh()
    assert network.entry("a") == entry


def test_the_bulk_lane_has_the_port_after_that_of_the_control_lane() -> None:
    address = Address("10.0.0.1", 29700)
    assert (address.of(CONTROL), address.of(BULK)) == ("tcp://10.0.0.1:29700", "tcp://10.0.0.1:29701")


def test_a_folder_says_whether_its_processes_belong_to_a_cluster(tmp_path: Path) -> None:
    path = make_key(tmp_path / "keys")
    assert network_of(tmp_path) is None
    write_book(tmp_path, Book(3, {}, []))
    write_network(tmp_path, path)
    network = network_of(tmp_path)
    assert network is not None
    assert network.key == load_key(path)


def test_a_key_is_named_that_is_missing_or_that_others_may_read(tmp_path: Path) -> None:
    path = make_key(tmp_path / "keys")
    write_book(tmp_path, Book(0, {}, []))
    write_network(tmp_path, path)
    path.chmod(0o644)
    with pytest.raises(UnusableInput, match="others may read it"):
        network_of(tmp_path)
    path.unlink()
    with pytest.raises(UnusableInput, match=r"cluster\.key: No such file"):
        network_of(tmp_path)


@pytest.mark.parametrize("text", [None, "{}", "nonsense"])
def test_without_a_book_there_is_no_network(tmp_path: Path, key: ClusterKey, text: str | None) -> None:
    if text is not None:
        (tmp_path / "book").write_text(text)
    with pytest.raises(UnusableInput, match="book"):
        Network(key, tmp_path)


def test_a_process_without_an_entry_cannot_listen(cluster: Cluster) -> None:
    cluster.lose("c")
    with pytest.raises(UnusableInput, match="c is not in the book"):
        cluster.join("c")


@pytest.mark.parametrize("lane", LANES)
def test_a_port_that_is_taken_is_named_and_the_process_may_try_again(cluster: Cluster, lane: Lane) -> None:
    async def scenario() -> None:
        taken = cluster.entries["c"].address
        port = taken.port + (1 if lane == CONTROL else -1)  # so that there is one port in common
        own = Address(taken.host, port)
        cluster.enter(1, "c", address=own)
        cluster.enter(1, "d", address=taken)
        d = cluster.join("d")
        with pytest.raises(UnusableInput, match=f"c cannot listen at {own.of(lane)}: Address already in use"):
            cluster.join("c")
        await d.close()
        c = cluster.join("c")
        await c.close()

    run(scenario())
