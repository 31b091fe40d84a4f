"""Partitions, slow links, kills and power-offs of simulated hosts, as other hosts observe them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import ROOT, Host, Hosts, Started
from tests.processes import wait_for_end

pytestmark = [pytest.mark.slow, pytest.mark.hosts]

PORT = 5000
ECHO = f"""
import socket
server = socket.create_server(("", {PORT}))
print("listening", flush=True)
connection, _ = server.accept()
while words := connection.recv(1 << 16):
    connection.sendall(words)
print("ended", flush=True)
"""
ASK = f"""
import socket, sys
connection = socket.create_connection((sys.argv[1], {PORT}))
print("connected", flush=True)
for line in sys.stdin:
    connection.sendall(line.encode())
    print(connection.makefile().readline(), end="", flush=True)
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


def connect(asking: Host, asked: Host) -> tuple[Started, Started]:
    server = asked.popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
    assert server.read_line() == "listening"
    client = asking.popen([sys.executable, "-c", ASK, asked.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.read_line() == "connected"
    return client, server


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # no time limit here: pytest has one
        time.sleep(0.02)


def count_retransmissions(host: Host) -> int:
    """Return the number of retransmissions on the only established connection."""
    (connection,) = host.list_connections()
    return int(connection[6], 16)


def test_a_partition_keeps_connections_and_delivers_after_it_heals(hosts: Hosts) -> None:
    client, server = connect(hosts[0], hosts[1])
    client.send_line("before")
    assert client.read_line() == "before"
    hosts.partition(hosts[1])
    client.send_line("meanwhile")
    wait_until(lambda: count_retransmissions(hosts[0]) > 1)
    assert (client.poll(), server.poll()) == (None, None)
    hosts.heal(hosts[1])
    assert client.read_line() == "meanwhile"


def test_a_slow_host_has_delay_in_both_directions_and_limited_bandwidth(hosts: Hosts) -> None:
    client, server = connect(hosts[0], hosts[1])
    hosts.slow(hosts[1], delay_ms=40, mbit_per_s=8)
    client.send_line("on the earlier connection")
    assert client.read_line() == "on the earlier connection"
    timed = f"""
import socket, time
began = time.monotonic()
connection = socket.create_connection(({hosts[1].address!r}, {PORT}))
print(time.monotonic() - began)
connection.sendall(bytes(1_000_000))
connection.shutdown(socket.SHUT_WR)
while connection.recv(1 << 16): pass
print(time.monotonic() - began)
"""
    client.kill()
    server.wait()
    server = hosts[1].popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
    assert server.read_line() == "listening"
    connect_s, total_s = map(float, hosts[0].run([sys.executable, "-c", timed]).split())
    assert connect_s >= 2 * 0.040
    assert total_s >= 1.0  # seconds for a million bytes at 8 Mbit/s


def test_hosts_share_files_but_not_memory_temporary_files_names_and_pids(hosts: Hosts, tmp_path: Path) -> None:
    one, other = hosts
    script = "echo $$ > /dev/shm/weights; touch $TMPDIR/socket; hostname > $0"
    one.run(["sh", "-c", script, str(tmp_path / "common")])
    assert other.run(["cat", str(tmp_path / "common")]) == "host1\n"
    assert (one.list_private_files(), other.list_private_files()) == (["tmp/socket", "weights"], [])
    assert int(one.path(Path("/dev/shm/weights")).read_text()) < 100
    assert not Path("/dev/shm/weights").exists()


def test_a_kill_closes_connections_but_a_power_off_does_not(hosts: Hosts) -> None:
    third = hosts.add()
    _, killed = connect(hosts[0], hosts[1])
    hosts[0].kill_all()
    assert hosts[0].list_processes() == {}
    assert killed.read_line() == "ended"
    _, deserted = connect(third, hosts[1])
    hosts.power_off(third)
    assert not third.is_on
    assert list(hosts[1].list_processes()) == [deserted.inner]
    assert hosts[1].list_connections() != []


def test_hosts_are_removed_if_their_creator_is_killed() -> None:
    making = """
import sys
from tests.cluster.hosts import Hosts
with Hosts(2) as hosts:
    hosts.slow(hosts[1], 10, 10)
    hosts[0].popen(["sh", "-c", "sleep 1000 & sleep 1000"], stdout=-3)
    while len(hosts[0].list_processes()) < 3: pass
    print(*(pid for host in hosts for pid in (host.first, *host.list_processes())), flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", making], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        pidfds = [os.pidfd_open(int(pid)) for pid in maker.stdout.readline().split()]
        maker.send_signal(signal.SIGKILL)
    assert len(pidfds) == 5
    for pidfd in pidfds:
        wait_for_end(pidfd)
