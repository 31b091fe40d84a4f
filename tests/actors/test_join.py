"""Runs over two nodes of this machine: `asterism run` on one, `asterism join` on the other, real processes on loopback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from actors.join_command import address_of, join_run
from actors.node import Joining
from bus.curve import make_key
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from tests.actors.running import ROOT, adds_up, finish, launch, said, until
from tests.processes import processes_that_name


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_key(tmp_path / "keys")


def free_port() -> int:
    """A run's first: this one and that of a node beside it, 100 further on, are free as far as one can tell."""
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
    process = subprocess.Popen(
        [sys.executable, "-m", "actors.cli", "join", f"tcp://127.0.0.1:{port}", *own, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_run_over_two_nodes_with_ranks_of_the_learner_on_both(tmp_path: Path, key: Path) -> None:
    port = free_port()
    settings = cluster(key, port, "cluster.nodes=2", "cluster.learner_nodes=2")
    with launch(tmp_path, *settings) as run, joined(port, key, "--generators", "1", "--executors", "1") as node:
        told = finish(node)
        assert node.returncode == 0, told
        output = finish(run)
    assert run.returncode == 0, output
    assert "the run is over" in told
    folder = RunFolder(tmp_path / "demo")
    summary = json.loads(folder.summary.read_bytes())
    assert adds_up(summary), summary
    assert summary["replay_identical"]
    assert [entry["node"] for entry in said(folder, "node.joined")] == [1]
    fetched = [
        line for line in (folder.logs / "generator-0@1.jsonl").read_text().splitlines() if "weights.fetched" in line
    ]
    assert len(fetched) >= 3  # one version a step, by way of the network
    assert (folder.logs / "learner-1.jsonl").exists()
    assert not processes_that_name(str(tmp_path))


@pytest.mark.slow
def test_a_node_leaves_and_the_run_goes_on(tmp_path: Path, key: Path) -> None:
    port = free_port()
    with launch(tmp_path, *cluster(key, port, "rl.steps=6")) as run, joined(port, key) as node:
        folder = RunFolder(tmp_path / "demo")
        until(lambda: bool(said(folder, "node.joined")), run)
        until(lambda: (folder.logs / "generator-0@1.jsonl").exists(), run)
        node.terminate()
        told = finish(node)
        output = finish(run)
    assert node.returncode == 130, told
    assert run.returncode == 0, output
    assert [entry["cause"] for entry in said(folder, "node.left")] == ["it was told to end"]
    assert adds_up(json.loads(folder.summary.read_bytes()))


@pytest.mark.parametrize(
    "endpoint", ["10.0.0.1", "tcp://10.0.0.1", "tcp://:29700", "10.0.0.1:0", "10.0.0.1:65536", "a:b"]
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(UnusableInput, match=f"{endpoint}: an endpoint is tcp://HOST:PORT"):
        address_of(endpoint)


@pytest.mark.slow
def test_what_cannot_be_joined_is_said(tmp_path: Path, key: Path) -> None:
    at, own = address_of(f"tcp://127.0.0.1:{free_port()}"), address_of(f"127.0.0.1:{free_port() + 2}")
    with pytest.raises(UnusableInput, match="none: No such file or directory; asterism keys makes a cluster's key"):
        join_run(Joining(at, own, tmp_path / "none"), Console(quiet=True))
    with pytest.raises(UnusableInput, match=r"has not answered for 0\.2 s"):
        join_run(Joining(at, own, key, patience_s=0.2), Console(quiet=True))
    assert not Joining(at, own, key).own_folder.sockets.exists()


def test_a_node_that_is_there_is_left_alone(key: Path) -> None:
    at, own = address_of("tcp://127.0.0.1:29700"), address_of(f"127.0.0.1:{free_port()}")
    joining = Joining(at, own, key)
    joining.own_folder.sockets.mkdir()
    try:
        with socket.socket() as there:
            there.bind((own.host, own.port))
            there.listen()
            with pytest.raises(UnusableInput, match=f"{own.port}: Address already in use; --host and --port say where"):
                join_run(joining, Console(quiet=True))
        assert joining.own_folder.sockets.exists()
        with pytest.raises(UnusableInput, match=r"192\.0\.2\.1:29700: Cannot assign requested address"):
            join_run(joining._replace(own=address_of("192.0.2.1:29700")), Console(quiet=True))
    finally:
        joining.own_folder.sockets.rmdir()


@pytest.mark.slow
def test_a_node_with_another_key_hears_nothing(tmp_path: Path, key: Path) -> None:
    port = free_port()
    other = make_key(tmp_path / "others")
    with launch(tmp_path, *cluster(key, port)) as run, joined(port, other, "--patience", "8") as node:
        told, output = finish(node), finish(run)
    assert node.returncode == 2, told
    assert "has not answered" in told
    assert run.returncode == 0, output
    assert not said(RunFolder(tmp_path / "demo"), "node.joined")
