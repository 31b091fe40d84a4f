"""The hosts that the tests of this folder run on: what a broken, a slow and a switched-off one looks like to the others."""

from __future__ import annotations

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


def connected(asking: Host, asked: Host) -> tuple[Started, Started]:
    server = asked.popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
    assert said(server) == "listening"
    client = asking.popen([sys.executable, "-c", ASK, asked.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert said(client) == "connected"
    return client, server


def ask(client: Started, word: str) -> None:
    assert client.stdin is not None
    client.stdin.write(f"{word}\n")
    client.stdin.flush()


def said(process: Started) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def until(condition: Callable[[], bool]) -> None:
    while not condition():  # pytest's time limit ends it
        time.sleep(0.02)


def times_sent_again(host: Host) -> int:
    """How often the kernel has sent what its one established connection carries again."""
    lines = host.run(["cat", "/proc/net/tcp"]).splitlines()[1:]
    (connection,) = (fields for line in lines if (fields := line.split())[3] == "01")
    return int(connection[6], 16)


def test_a_partition_is_silent_and_what_was_sent_meanwhile_arrives_by_the_same_connection(hosts: Hosts) -> None:
    client, server = connected(hosts[0], hosts[1])
    ask(client, "before")
    assert said(client) == "before"
    hosts.partition(hosts[1])
    ask(client, "meanwhile")
    until(lambda: times_sent_again(hosts[0]) > 1)
    assert (client.poll(), server.poll()) == (None, None)
    hosts.heal(hosts[1])
    assert said(client) == "meanwhile"


def test_a_slow_hosts_wire_delays_each_way_and_carries_so_much_a_second(hosts: Hosts) -> None:
    client, server = connected(hosts[0], hosts[1])
    hosts.slow(hosts[1], delay_ms=40, mbit_per_s=8)
    ask(client, "by the connection from before")
    assert said(client) == "by the connection from before"
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
    assert said(server) == "listening"
    to_connect_s, in_all_s = map(float, hosts[0].run([sys.executable, "-c", timed]).split())
    assert to_connect_s >= 2 * 0.040
    assert in_all_s >= 1.0  # a million bytes at 8 Mbit/s


def test_a_hosts_memory_temporary_files_name_and_process_ids_are_its_own_and_all_else_is_common(
    hosts: Hosts, tmp_path: Path
) -> None:
    one, other = hosts
    script = "echo $$ > /dev/shm/weights; touch $TMPDIR/socket; hostname > $0"
    one.run(["sh", "-c", script, str(tmp_path / "common")])
    assert other.run(["cat", str(tmp_path / "common")]) == "host1\n"
    assert (one.own_files(), other.own_files()) == (["tmp/socket", "weights"], [])
    assert int(one.path(Path("/dev/shm/weights")).read_text()) < 100
    assert not Path("/dev/shm/weights").exists()


def test_a_host_whose_processes_are_killed_ends_its_connections_and_one_that_is_switched_off_does_not(
    hosts: Hosts,
) -> None:
    third = hosts.add()
    _, killed = connected(hosts[0], hosts[1])
    hosts[0].kill_all()
    assert hosts[0].processes() == {}
    assert said(killed) == "ended"
    _, deserted = connected(third, hosts[1])
    hosts.power_off(third)
    assert not third.is_on
    assert list(hosts[1].processes()) == [deserted.inner]
    assert "01" in {line.split()[3] for line in hosts[1].run(["cat", "/proc/net/tcp"]).splitlines()}


def test_nothing_is_left_of_hosts_whose_maker_was_killed() -> None:
    making = """
import sys
from tests.cluster.hosts import Hosts
with Hosts(2) as hosts:
    hosts.slow(hosts[1], 10, 10)
    hosts[0].popen(["sh", "-c", "sleep 1000 & sleep 1000"], stdout=-3)
    while len(hosts[0].processes()) < 3: pass
    print(*(pid for host in hosts for pid in (host.first, *host.processes())), flush=True)
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
