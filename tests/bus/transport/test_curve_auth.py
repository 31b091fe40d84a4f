"""Tests of encryption and authentication with a cluster's key."""

import asyncio
import stat
from pathlib import Path

import pytest
import zmq
from typer.testing import CliRunner

from asterism.actors.cli.main import app
from asterism.bus.bus import Bus
from asterism.bus.lanes import BULK
from asterism.bus.messages import LeaseReleased
from asterism.bus.transport.address_book import TcpAddress
from asterism.bus.transport.curve_auth import KEY_FILE, ClusterKey, generate_key, load_key
from asterism.bus.transport.packets import Packet, encode_packet
from asterism.configs.errors import UnusableInput
from tests.bus.clusters import Cluster
from tests.bus.networks import call, wait_until

pytestmark = [pytest.mark.usefixtures("short_waits"), pytest.mark.real_clock, pytest.mark.timeout(30)]


def make_key(folder: Path) -> ClusterKey:
    return load_key(generate_key(folder))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    cluster = Cluster(tmp_path, make_key(tmp_path / "keys"))
    for node, process in enumerate("ab"):
        cluster.add(node, process)
    return cluster


async def test_processes_with_the_key_can_communicate(cluster: Cluster) -> None:
    a, b = cluster.join("a"), cluster.join("b")
    for number in range(500):
        await a.send("b", call(number))
        await b.send("a", LeaseReleased(number, 5))
    assert [(await b.receive()).message for _ in range(500)] == [call(number) for number in range(500)]
    assert [(await a.receive()).message for _ in range(500)] == [LeaseReleased(number, 5) for number in range(500)]
    await wait_until(lambda: not a.unacknowledged and not b.unacknowledged)
    assert (a.dropped, b.dropped) == (0, 0)


async def probe_as_stranger(address: TcpAddress, server: ClusterKey | None, own: ClusterKey, bus: Bus) -> list[int]:
    """Send packets to the bus without the cluster's key, and return the events of the connection.

    Without `server`, the connection is not encrypted.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if server is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, server.public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        socket.connect(address.format_endpoint(BULK))
        socket.send(encode_packet(Packet("x", "b", 0, 0, 0, 0, 0, [b"x"])))
        socket.send(encode_packet(Packet("x", "b", 0, -1, 0, 0, 0, [])))
        await wait_until(lambda: bus.dropped > 0)
        await asyncio.sleep(0.3)  # any event in this time fails the test
        assert not socket.poll(0)
        events: list[int] = []
        while monitor.poll(0):
            event, _ = monitor.recv_multipart()
            events.append(int.from_bytes(event[:2], "little"))
        socket.disable_monitor()
        monitor.close()
        return events


@pytest.mark.slow
@pytest.mark.parametrize("stranger", ["no_key", "wrong_key", "wrong_cluster"])
async def test_a_peer_without_a_key_is_counted_and_ignored(tmp_path: Path, cluster: Cluster, stranger: str) -> None:
    """A peer with the wrong key knows the cluster's public key and has a key pair of its own."""
    other = make_key(tmp_path / "others")
    server = {"no_key": None, "wrong_key": cluster.key, "wrong_cluster": other}[stranger]
    b = cluster.join("b")
    events = await probe_as_stranger(cluster.entries["b"].address, server, other, b)
    assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events
    assert zmq.EVENT_HANDSHAKE_FAILED_AUTH not in events
    assert b.waiting == 0
    a = cluster.join("a")  # this peer has the key
    await a.send("b", call(1))
    assert (await b.receive()).message == call(1)


@pytest.mark.slow
async def test_messages_of_a_bus_with_another_key_are_dropped(tmp_path: Path, cluster: Cluster) -> None:
    b = cluster.join("b")
    a = cluster.join("a", network=cluster.network(0, make_key(tmp_path / "others")))
    await a.send("b", call(1))
    await wait_until(lambda: b.dropped > 0)
    assert (b.waiting, a.unacknowledged) == (0, {"b": 1})


def test_the_keys_command_creates_a_private_file_and_replaces_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    made = CliRunner().invoke(app, ["keys", str(folder)])
    path = folder / KEY_FILE
    assert made.exit_code == 0, made.output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = load_key(path)
    assert key.public.decode() in made.output
    assert key.secret.decode() not in made.output + repr(key)
    odd = CliRunner().invoke(app, ["keys", str(tmp_path / "k:smile:[bold]")])
    assert "k:smile:[bold]/cluster.key: copy it" in odd.output
    again = CliRunner().invoke(app, ["keys", str(folder)])
    assert isinstance(again.exception, UnusableInput)
    assert load_key(path) == key


def test_the_error_for_an_uncreatable_folder_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnusableInput, match=f"^{tmp_path / 'file' / 'keys' / KEY_FILE}: Not a directory$"):
        generate_key(tmp_path / "file" / "keys")
    with pytest.raises(UnusableInput, match=f"^{tmp_path / 'file'}: Not a directory$"):
        generate_key(tmp_path / "file")


def test_a_key_that_other_users_can_read_is_refused(tmp_path: Path) -> None:
    path = generate_key(tmp_path)
    path.chmod(0o640)
    with pytest.raises(UnusableInput, match="other users may read it"):
        load_key(path)


@pytest.mark.parametrize("text", ["", "short", "x" * 40 + "y", "\x00" * 40])
def test_an_invalid_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / KEY_FILE
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UnusableInput, match="not a key"):
        load_key(path)


def test_the_error_for_a_missing_key_names_the_command_that_creates_it(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match="asterism keys"):
        load_key(tmp_path / KEY_FILE)
