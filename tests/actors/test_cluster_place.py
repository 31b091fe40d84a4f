"""Which node of a cluster `asterism run` is, and what follows from that for the addresses and the number of nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from actors import cluster_place, run_command
from actors.cluster_place import of_another, of_node_0
from actors.node import Joining
from bus.book import Address
from configs.errors import UnusableInput
from configs.placement import Place
from configs.schema import Cluster, Run

SRUN = Place(1, 3, "node01", "srun")
WITH_KEY = Run(name="run", cluster=Cluster(key="cluster.key", port=29_600))


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Towards which hosts this one's address was looked for."""
    asked: list[tuple[str, int]] = []

    def host_address(towards: str, port: int) -> str:
        asked.append((towards, port))
        return "10.0.0.9"

    monkeypatch.setattr(cluster_place, "host_address", host_address)
    return asked


def test_a_run_on_this_machine_alone_is_as_it_was(asked: list[tuple[str, int]]) -> None:
    assert of_node_0(Run(name="run"), None) == Run(name="run")
    assert asked == []


def test_a_run_that_others_may_join_has_an_address_towards_the_outside(asked: list[tuple[str, int]]) -> None:
    assert of_node_0(WITH_KEY, None).cluster == Cluster(key="cluster.key", port=29_600, host="10.0.0.9")
    assert asked == [("192.0.2.1", 29_600)]


def test_who_was_placed_begins_with_as_many_nodes_as_were_started(asked: list[tuple[str, int]]) -> None:
    cluster = of_node_0(WITH_KEY, SRUN._replace(rank=0)).cluster
    assert (cluster.nodes, cluster.host) == (3, "10.0.0.9")
    assert asked == [("node01", 29_600)]


def test_an_address_that_is_configured_is_kept(asked: list[tuple[str, int]]) -> None:
    run = Run(name="run", cluster=Cluster(key="cluster.key", host="10.1.1.1"))
    assert of_node_0(run, SRUN).cluster.host == "10.1.1.1"
    assert asked == []
    assert of_another(run, SRUN).at == Address("10.1.1.1", run.cluster.port)


def test_another_node_joins_the_one_of_rank_0() -> None:
    joining = of_another(WITH_KEY, SRUN)
    assert joining == Joining(Address("node01", 29_600), Address("10.0.0.9", 29_600), Path("cluster.key"))


@pytest.mark.parametrize("place_in", [of_node_0, of_another])
def test_nodes_that_were_started_together_need_a_key(place_in: object) -> None:
    with pytest.raises(UnusableInput, match=r"^cluster\.key: srun started 3 nodes; name a file that `asterism keys`"):
        place_in(Run(name="run"), SRUN)  # pyright: ignore[reportCallIssue]


def test_a_run_on_a_further_node_joins_and_takes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Joining] = []
    monkeypatch.setattr(run_command, "place_of", lambda environment: SRUN)
    monkeypatch.setattr(run_command, "join_run", lambda joining, console: joined.append(joining) or 130)
    settings = ["cluster.key=cluster.key", f'runs_folder="{tmp_path}"']
    code = run_command.run_recipe(Path("configs/tiny.toml"), settings, resume=False, overwrite=False, console=Console())
    assert code == 130
    assert [(joining.at.host, joining.key) for joining in joined] == [("node01", Path("cluster.key"))]
    assert list(tmp_path.iterdir()) == []
