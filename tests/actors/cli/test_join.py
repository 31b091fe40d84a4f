"""`asterism join` runs as a real process of a second node on loopback. tests/cluster has runs over several hosts."""

import socket
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from asterism.actors.cli.join_command import join_run, parse_endpoint
from asterism.actors.launch.join_handshake import JoinOptions
from asterism.bus.transport.curve_auth import generate_key
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import (
    ASTERISM,
    finish,
    launch,
    read_conserved_summary,
    read_log_entries,
    start_command,
    wait_until,
)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return generate_key(tmp_path / "keys")


def free_port() -> int:
    """Return a free port for a run; the port of its node, which is 100 higher, is free too."""
    for port in range(31_000, 60_000, 100):
        if _is_free(port) and _is_free(port + 100):
            return port
    raise AssertionError("no port is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def cluster(key: Path, port: int, *more: str) -> tuple[str, ...]:
    return (f"cluster.key={key}", "cluster.host=127.0.0.1", f"cluster.port={port}", *more)


@contextmanager
def joined(port: int, key: Path, *options: str) -> Generator[subprocess.Popen[str]]:
    own = ("--host", "127.0.0.1", "--port", str(port + 100), "--key", str(key))
    process = start_command([*ASTERISM, "join", f"tcp://127.0.0.1:{port}", *own, *options])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.nightly
@pytest.mark.slow
def test_the_run_continues_after_a_node_leaves(tmp_path: Path, key: Path) -> None:
    port = free_port()
    with launch(tmp_path, *cluster(key, port, "rl.steps=6")) as run, joined(port, key) as node:
        folder = RunFolder(tmp_path / "demo")
        wait_until(lambda: bool(read_log_entries(folder, "node.joined")), run)
        wait_until(lambda: (folder.logs / "generator-0@1.jsonl").exists(), run)
        node.terminate()
        node_output = finish(node)
        output = finish(run)
    assert node.returncode == 130, node_output
    assert run.returncode == 0, output
    assert [entry["cause"] for entry in read_log_entries(folder, "node.left")] == ["interrupted"]
    read_conserved_summary(folder)


@pytest.mark.slow
def test_a_missing_key_and_a_missing_run_are_reported(tmp_path: Path, key: Path) -> None:
    at, own = parse_endpoint(f"tcp://127.0.0.1:{free_port()}"), parse_endpoint(f"127.0.0.1:{free_port() + 2}")
    with pytest.raises(UnusableInput, match="none: No such file or directory; generate a key with `asterism keys`"):
        join_run(JoinOptions(at, own, tmp_path / "none"), Console(quiet=True))
    with pytest.raises(UnusableInput, match=r"has not answered for 0\.2 s"):
        join_run(JoinOptions(at, own, key, join_timeout_s=0.2), Console(quiet=True))
    assert not JoinOptions(at, own, key).own_folder.sockets.exists()


def test_an_occupied_port_is_reported_and_the_other_nodes_folder_is_kept(key: Path) -> None:
    at, own = parse_endpoint("tcp://127.0.0.1:29700"), parse_endpoint(f"127.0.0.1:{free_port()}")
    joining = JoinOptions(at, own, key)
    joining.own_folder.sockets.mkdir()
    try:
        with socket.socket() as there:
            there.bind((own.host, own.port))
            there.listen()
            with pytest.raises(
                UnusableInput, match=f"{own.port}: Address already in use; set another address with --host"
            ):
                join_run(joining, Console(quiet=True))
        assert joining.own_folder.sockets.exists()
        with pytest.raises(UnusableInput, match=r"192\.0\.2\.1:29700: Cannot assign requested address"):
            join_run(joining._replace(own_address=parse_endpoint("192.0.2.1:29700")), Console(quiet=True))
    finally:
        joining.own_folder.sockets.rmdir()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_node_with_another_key_receives_no_answer(tmp_path: Path, key: Path) -> None:
    port = free_port()
    other = generate_key(tmp_path / "others")
    with launch(tmp_path, *cluster(key, port)) as run, joined(port, other, "--patience", "8") as node:
        node_output, output = finish(node), finish(run)
    assert node.returncode == 2, node_output
    assert "has not answered" in node_output
    assert run.returncode == 0, output
    assert not read_log_entries(RunFolder(tmp_path / "demo"), "node.joined")
