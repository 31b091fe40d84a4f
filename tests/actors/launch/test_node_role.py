"""`asterism run` gets the addresses and the number of nodes for node 0 or for a joining node."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from asterism.actors.cli import run_command
from asterism.actors.launch import job_environment as node_role
from asterism.actors.launch.job_environment import NodePlacement, configure_head, configure_worker
from asterism.actors.launch.join_handshake import JoinOptions
from asterism.actors.stages.stage_sequence import StageSelection
from asterism.bus.transport.address_book import TcpAddress
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.machines import ClusterConfig
from asterism.configs.schema.run_config import RunConfig

SRUN = NodePlacement(1, 3, "node01", "srun")
WITH_HOST = RunConfig(name="run", cluster=ClusterConfig(key="cluster.key", host="10.1.1.1"))
WITH_KEY = RunConfig(name="run", cluster=ClusterConfig(key="cluster.key", port=29_600))


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record the peers for which this host's address was determined."""
    peers: list[tuple[str, int]] = []

    def host_address(peer: str, port: int) -> str:
        peers.append((peer, port))
        return "10.0.0.9"

    monkeypatch.setattr(node_role, "find_host_address", host_address)
    return peers


@pytest.mark.parametrize(
    ("run", "place", "host", "nodes", "expected_peers"),
    [
        (RunConfig(name="run"), None, "", 1, []),
        (WITH_KEY, None, "10.0.0.9", 1, [("192.0.2.1", 29_600)]),  # address on the default route
        (WITH_KEY, SRUN._replace(rank=0), "10.0.0.9", 3, [("node01", 29_600)]),
        (WITH_HOST, SRUN._replace(rank=0), "10.1.1.1", 3, []),
    ],
    ids=["no cluster", "other nodes may join", "placed", "configured address"],
)
def test_the_head_gets_its_address_and_the_number_of_nodes(
    run: RunConfig,
    place: NodePlacement | None,
    host: str,
    nodes: int,
    expected_peers: list[tuple[str, int]],
    peers: list[tuple[str, int]],
) -> None:
    assert configure_head(run, place) == replace(run, cluster=replace(run.cluster, host=host, nodes=nodes))
    assert peers == expected_peers


def test_another_node_joins_the_node_of_rank_0() -> None:
    options = configure_worker(WITH_KEY, SRUN)
    assert options == JoinOptions(TcpAddress("node01", 29_600), TcpAddress("10.0.0.9", 29_600), Path("cluster.key"))
    assert configure_worker(WITH_HOST, SRUN).head_address == TcpAddress("10.1.1.1", WITH_HOST.cluster.port)


@pytest.mark.parametrize("configure", [configure_head, configure_worker])
def test_nodes_that_start_together_need_a_key(configure: object) -> None:
    with pytest.raises(
        UnusableInput, match=r"^cluster\.key: srun started 3 nodes; set cluster\.key to a file made by `asterism keys`"
    ):
        configure(RunConfig(name="run"), SRUN)  # pyright: ignore[reportCallIssue]


def test_a_run_on_another_node_joins_and_claims_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[JoinOptions] = []
    monkeypatch.setattr(run_command, "read_placement", lambda environment: SRUN)
    monkeypatch.setattr(run_command, "join_run", lambda options, console: joined.append(options) or 130)
    settings = ["cluster.key=cluster.key", f'runs_folder="{tmp_path}"']
    code = run_command.run_recipe(Path("configs/tiny.toml"), settings, StageSelection(), Console())
    assert code == 130
    assert [(options.head_address.host, options.key_file) for options in joined] == [
        ("node01", Path.cwd() / "cluster.key")
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_only_evaluates_is_refused() -> None:
    with pytest.raises(UnusableInput, match=r"tiny\.toml: evaluation\.only is for `asterism eval`"):
        run_command.run_recipe(Path("configs/tiny.toml"), ["evaluation.only=true"], StageSelection(), Console())
