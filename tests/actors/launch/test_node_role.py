"""Configuring `asterism run` as node 0 or as a joining node: addresses and number of nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from actors.cli import run_command
from actors.launch import job_environment as node_role
from actors.launch.job_environment import NodePlacement, configure_head, configure_worker
from actors.launch.join_handshake import JoinOptions
from bus.transport.address_book import TcpAddress
from configs.errors import UnusableInput
from configs.schema import ClusterConfig, RunConfig

SRUN = NodePlacement(1, 3, "node01", "srun")
WITH_KEY = RunConfig(name="run", cluster=ClusterConfig(key="cluster.key", port=29_600))


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The peers towards which this host's address was determined."""
    peers: list[tuple[str, int]] = []

    def host_address(peer: str, port: int) -> str:
        peers.append((peer, port))
        return "10.0.0.9"

    monkeypatch.setattr(node_role, "find_host_address", host_address)
    return peers


def test_a_single_node_run_is_unchanged(peers: list[tuple[str, int]]) -> None:
    assert configure_head(RunConfig(name="run"), None) == RunConfig(name="run")
    assert peers == []


def test_a_run_with_a_key_gets_the_address_of_its_default_route(peers: list[tuple[str, int]]) -> None:
    assert configure_head(WITH_KEY, None).cluster == ClusterConfig(key="cluster.key", port=29_600, host="10.0.0.9")
    assert peers == [("192.0.2.1", 29_600)]


def test_a_placed_head_waits_for_all_started_nodes(peers: list[tuple[str, int]]) -> None:
    cluster = configure_head(WITH_KEY, SRUN._replace(rank=0)).cluster
    assert (cluster.nodes, cluster.host) == (3, "10.0.0.9")
    assert peers == [("node01", 29_600)]


def test_a_configured_address_is_kept(peers: list[tuple[str, int]]) -> None:
    run = RunConfig(name="run", cluster=ClusterConfig(key="cluster.key", host="10.1.1.1"))
    assert configure_head(run, SRUN).cluster.host == "10.1.1.1"
    assert peers == []
    assert configure_worker(run, SRUN).head_address == TcpAddress("10.1.1.1", run.cluster.port)


def test_another_node_joins_the_node_of_rank_0() -> None:
    options = configure_worker(WITH_KEY, SRUN)
    assert options == JoinOptions(TcpAddress("node01", 29_600), TcpAddress("10.0.0.9", 29_600), Path("cluster.key"))


@pytest.mark.parametrize("configure", [configure_head, configure_worker])
def test_nodes_that_were_started_together_need_a_key(configure: object) -> None:
    with pytest.raises(
        UnusableInput, match=r"^cluster\.key: srun started 3 nodes; set cluster\.key to a file made by `asterism keys`"
    ):
        configure(RunConfig(name="run"), SRUN)  # pyright: ignore[reportCallIssue]


def test_a_run_on_another_node_joins_and_claims_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[JoinOptions] = []
    monkeypatch.setattr(run_command, "read_placement", lambda environment: SRUN)
    monkeypatch.setattr(run_command, "join_run", lambda options, console: joined.append(options) or 130)
    settings = ["cluster.key=cluster.key", f'runs_folder="{tmp_path}"']
    code = run_command.run_recipe(Path("configs/tiny.toml"), settings, resume=False, overwrite=False, console=Console())
    assert code == 130
    assert [(options.head_address.host, options.key_file) for options in joined] == [("node01", Path("cluster.key"))]
    assert list(tmp_path.iterdir()) == []
