"""The bus between hosts: partitions, slow links, and clients without the key."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asterism.bus.transport.address_book import (
    AddressBook,
    AddressEntry,
    TcpAddress,
    write_address_book,
    write_key_location,
)
from asterism.bus.transport.curve_auth import generate_key, load_key
from tests.cluster.hosts import Host, Hosts, Started

pytestmark = [pytest.mark.slow, pytest.mark.hosts, pytest.mark.timeout(120)]

PORT = 29_700
SOCKETS = Path("/dev/shm/tmp/sockets")  # a folder that each host has for itself
NAMES = ("a", "b", "c")


class Peers:
    """One peer on each host, named a, b and c. `speedup` divides the timeouts of heartbeats and handshakes."""

    def __init__(self, hosts: Hosts, folder: Path, window: int, speedup: int = 1) -> None:
        self.hosts = dict(zip(NAMES, hosts, strict=True))
        self.key = generate_key(folder / "keys")
        entries = {name: AddressEntry(TcpAddress(host.address, PORT), host.number) for name, host in self.hosts.items()}
        self._started: dict[str, Started] = {}
        for name, host in self.hosts.items():
            sockets = host.path(SOCKETS)
            sockets.mkdir()
            write_address_book(sockets, AddressBook(host.number, entries, []))
            write_key_location(sockets, self.key)
            words = [sys.executable, "-m", "tests.cluster.peer", name, str(SOCKETS), str(window), str(speedup)]
            self._started[name] = host.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def send_command(self, name: str, command: str) -> None:
        self._started[name].send_line(command)

    def read_state(self, name: str) -> dict[str, Any]:
        self.send_command(name, "state")
        state = json.loads(self._started[name].read_line())
        assert state["disorder"] == state["failed"] == [], name
        return state

    def count_received(self, name: str, sender: str) -> int:
        return self.read_state(name)["received"].get(sender, 0)

    def wait_until_received(self, name: str, sender: str, count: int) -> None:
        while self.count_received(name, sender) < count:  # no time limit here: pytest has one
            time.sleep(0.02)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


def count_connections(host: Host, to: Host) -> int:
    """Count the established connections of the host."""
    address = "".join(f"{int(part):02X}" for part in reversed(to.address.split(".")))
    return sum(fields[2].startswith(address) for fields in host.list_connections())


@pytest.mark.parametrize("until_closed", [False, True], ids=["for a moment", "until connections are closed"])
def test_frames_arrive_once_and_in_order_through_a_partition(hosts: Hosts, tmp_path: Path, until_closed: bool) -> None:
    window, count = 200, 4_000
    peers = Peers(hosts, tmp_path, window, speedup=5 if until_closed else 1)
    pairs = [(one, other) for one in NAMES for other in NAMES if one != other]
    for name in NAMES:
        peers.send_command(name, f"read {2 * window}" if name == "b" else "read")
    for one, other in pairs:
        peers.send_command(one, f"send {other} {count} 1000")
    while sum(peers.read_state("b")["received"].values()) < 2 * window:
        time.sleep(0.02)
    hosts.partition(peers.hosts["b"])
    peers.send_command("b", "read")
    until_received = count if until_closed else min(count, peers.count_received("c", "a") + window)
    peers.wait_until_received("c", "a", until_received)
    assert peers.count_received("b", "a") < count
    assert peers.count_received("b", "c") < count
    while until_closed and count_connections(peers.hosts["a"], peers.hosts["b"]):
        time.sleep(0.1)
    hosts.heal(peers.hosts["b"])
    for one, other in pairs:
        peers.wait_until_received(other, one, count)
    for name in NAMES:
        while (state := peers.read_state(name))["held"]:
            time.sleep(0.02)
        assert all(held <= 2 * window for held in state["max_held"].values())  # a window for each of two lanes


@pytest.mark.nightly
def test_a_partition_closes_a_connection_with_a_full_window(hosts: Hosts, tmp_path: Path) -> None:
    """Heartbeats must detect the partition although they wait behind queued data."""
    peers = Peers(hosts, tmp_path, window=1000)
    hosts.slow(peers.hosts["b"], delay_ms=5, mbit_per_s=20)
    peers.send_command("b", "read")
    peers.send_command("a", "send b 200 100000")
    peers.wait_until_received("b", "a", 1)
    hosts.partition(peers.hosts["b"])
    while count_connections(peers.hosts["a"], peers.hosts["b"]):
        time.sleep(0.1)
    assert peers.count_received("b", "a") < 200
    hosts.heal(peers.hosts["b"])
    peers.wait_until_received("b", "a", 200)


def test_a_slow_link_blocks_only_its_sender(hosts: Hosts, tmp_path: Path) -> None:
    window, count, size = 40, 200, 30_000
    peers = Peers(hosts, tmp_path, window)
    hosts.slow(peers.hosts["b"], delay_ms=50, mbit_per_s=10)
    peers.send_command("b", "read")
    peers.send_command("c", "read")
    peers.send_command("a", f"send b {count} {size}")
    peers.wait_until_received("b", "a", 1)
    peers.send_command("a", f"send c {count} {size}")
    peers.wait_until_received("c", "a", count)
    assert peers.count_received("b", "a") < count
    peers.wait_until_received("b", "a", count)
    state = peers.read_state("a")
    assert state["sent"] == {"b": count, "c": count}
    assert window <= state["max_held"]["b"] <= 2 * window
    assert state["max_held"]["c"] <= 2 * window
    assert peers.read_state("b")["dropped"] == 0  # no retransmission on a slow link


@pytest.mark.parametrize("has_public_key", [False, True])
def test_a_client_without_a_key_gets_only_a_handshake(hosts: Hosts, tmp_path: Path, has_public_key: bool) -> None:
    peers = Peers(hosts, tmp_path, window=100, speedup=5)
    server, stranger = peers.hosts["b"], peers.hosts["c"]
    peers.send_command("b", "read")
    public = [load_key(peers.key).public.decode()] if has_public_key else []
    peers.read_state("b")  # a peer that answers has opened its port
    words = [sys.executable, "-m", "tests.cluster.stranger", server.address, str(PORT + 1), *public]
    received_bytes = bytes.fromhex(stranger.run(words))
    greeting, curve_welcome = 64, 2 + 168  # ZMTP 3.1: greeting; CURVE's WELCOME
    if has_public_key:
        assert len(received_bytes) == greeting + curve_welcome
    else:
        assert 0 < len(received_bytes) <= greeting  # the server can close the connection earlier
    assert b"ERROR" not in received_bytes
    assert b"READY" not in received_bytes
    state = peers.read_state("b")
    assert state["waiting"] == 0
    assert state["received"] == {}
    assert state["dropped"] > 0
    peers.send_command("c", "send b 10 10")  # the server serves a client with the key on the same host
    peers.wait_until_received("b", "c", 10)
