"""The bus between hosts: through a partition, over a slow link, and at the door of those who do not hold the key."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.book import Address, Book, Entry, write_book, write_network
from bus.curve import load_key, make_key
from tests.cluster.hosts import Host, Hosts, Started

pytestmark = [pytest.mark.slow, pytest.mark.hosts, pytest.mark.timeout(120)]

PORT = 29_700
SOCKETS = Path("/dev/shm/tmp/sockets")  # on each host, its own
NAMES = ("a", "b", "c")


class Peers:
    """One on each host, called a, b and c."""

    def __init__(self, hosts: Hosts, folder: Path, window: int) -> None:
        self.hosts = dict(zip(NAMES, hosts, strict=True))
        self.key = make_key(folder / "keys")
        entries = {name: Entry(Address(host.address, PORT), host.number) for name, host in self.hosts.items()}
        self._started: dict[str, Started] = {}
        for name, host in self.hosts.items():
            sockets = host.path(SOCKETS)
            sockets.mkdir()
            write_book(sockets, Book(host.number, entries, []))
            write_network(sockets, self.key)
            words = [sys.executable, "-m", "tests.cluster.peer", name, str(SOCKETS), str(window)]
            self._started[name] = host.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def tell(self, name: str, command: str) -> None:
        pipe = self._started[name].stdin
        assert pipe is not None
        pipe.write(command + "\n")
        pipe.flush()

    def state(self, name: str) -> dict[str, Any]:
        self.tell(name, "state")
        pipe = self._started[name].stdout
        assert pipe is not None
        state = json.loads(pipe.readline())
        assert state["disorder"] == state["failed"] == [], name
        return state

    def received(self, name: str, sender: str) -> int:
        return self.state(name)["received"].get(sender, 0)

    def until_received(self, name: str, sender: str, count: int) -> None:
        while self.received(name, sender) < count:  # pytest's time limit ends it
            time.sleep(0.02)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


def connections(host: Host, to: Host) -> int:
    """How many are established, by the host's own account."""
    address = "".join(f"{int(part):02X}" for part in reversed(to.address.split(".")))
    lines = host.run(["cat", "/proc/net/tcp"]).splitlines()[1:]
    return sum(line.split()[2].startswith(address) and line.split()[3] == "01" for line in lines)


@pytest.mark.parametrize("until_cut", [False, True], ids=["for a moment", "until connections are given up"])
def test_all_arrives_once_and_in_order_through_a_partition(hosts: Hosts, tmp_path: Path, until_cut: bool) -> None:
    window, count = 1000, 20_000
    peers = Peers(hosts, tmp_path, window)
    ways = [(one, other) for one in NAMES for other in NAMES if one != other]
    for name in NAMES:
        peers.tell(name, f"read {2 * window}" if name == "b" else "read")
    for one, other in ways:
        peers.tell(one, f"send {other} {count} 1000")
    while sum(peers.state("b")["received"].values()) < 2 * window:
        time.sleep(0.02)
    hosts.partition(peers.hosts["b"])
    peers.tell("b", "read")
    peers.until_received("c", "a", count)
    peers.until_received("a", "c", count)
    assert peers.received("b", "a") < count
    assert peers.received("b", "c") < count
    if until_cut:
        while connections(peers.hosts["a"], peers.hosts["b"]):
            time.sleep(0.1)
    else:
        assert connections(peers.hosts["a"], peers.hosts["b"]) > 0
    hosts.heal(peers.hosts["b"])
    for one, other in ways:
        peers.until_received(other, one, count)
    for name in NAMES:
        while (state := peers.state(name))["held"]:
            time.sleep(0.02)
        assert all(held <= 2 * window for held in state["most_held"].values())  # of two lanes


def test_a_connection_that_is_full_is_given_up_too(hosts: Hosts, tmp_path: Path) -> None:
    """What waits in it keeps heartbeats from being sent."""
    peers = Peers(hosts, tmp_path, window=1000)
    hosts.slow(peers.hosts["b"], delay_ms=5, mbit_per_s=20)
    peers.tell("b", "read")
    peers.tell("a", "send b 200 100000")
    peers.until_received("b", "a", 1)
    hosts.partition(peers.hosts["b"])
    while connections(peers.hosts["a"], peers.hosts["b"]):
        time.sleep(0.1)
    assert peers.received("b", "a") < 200
    hosts.heal(peers.hosts["b"])
    peers.until_received("b", "a", 200)


def test_who_sends_over_a_slow_link_waits_and_who_has_a_fast_one_does_not(hosts: Hosts, tmp_path: Path) -> None:
    window, size = 40, 30_000
    peers = Peers(hosts, tmp_path, window)
    hosts.slow(peers.hosts["b"], delay_ms=50, mbit_per_s=10)
    peers.tell("b", "read")
    peers.tell("c", "read")
    peers.tell("a", f"send b 400 {size}")
    peers.until_received("b", "a", 1)
    peers.tell("a", f"send c 400 {size}")
    peers.until_received("c", "a", 400)
    assert peers.received("b", "a") < 400
    peers.until_received("b", "a", 400)
    state = peers.state("a")
    assert state["sent"] == {"b": 400, "c": 400}
    assert window <= state["most_held"]["b"] <= 2 * window
    assert state["most_held"]["c"] <= 2 * window
    assert peers.state("b")["dropped"] == 0  # what is slow is not sent again


@pytest.mark.parametrize("knows_the_public_key", [False, True])
def test_who_does_not_hold_the_key_hears_nothing_but_the_beginning_of_a_handshake(
    hosts: Hosts, tmp_path: Path, knows_the_public_key: bool
) -> None:
    peers = Peers(hosts, tmp_path, window=100)
    asked, strangers = peers.hosts["b"], peers.hosts["c"]
    peers.tell("b", "read")
    public = [load_key(peers.key).public.decode()] if knows_the_public_key else []
    peers.state("b")  # it listens
    words = [sys.executable, "-m", "tests.cluster.stranger", asked.address, str(PORT + 1), *public]
    heard = bytes.fromhex(strangers.run(words))
    greeting, welcome = 64, 2 + 168  # of ZMTP 3.1: the version and the mechanism; what CURVE answers who knows its key
    if knows_the_public_key:
        assert len(heard) == greeting + welcome
    else:
        assert 0 < len(heard) <= greeting  # it may hang up before it has said all of that
    assert b"ERROR" not in heard
    assert b"READY" not in heard
    state = peers.state("b")
    assert state["waiting"] == 0
    assert state["received"] == {}
    assert state["dropped"] > 0
    peers.tell("c", "send b 10 10")  # who holds it, on the same host, is served all the same
    peers.until_received("b", "c", 10)
