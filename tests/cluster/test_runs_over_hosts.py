"""Runs of the tiny recipe over several hosts, with partitions, slow links and killed nodes."""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import from_cold_start_of, is_conserved
from tests.chaos.rank_faults import LOSS, RankFault, make_environment
from tests.cluster.hosts import Hosts
from tests.cluster.running import ClusterRun

pytestmark = [pytest.mark.slow, pytest.mark.hosts, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cold(finished_run: tuple[RunFolder, str]) -> tuple[str, ...]:
    """Return settings that start a run from the common cold start."""
    return from_cold_start_of(finished_run[0])


def assert_invariants(run: ClusterRun, summary: dict[str, Any]) -> None:
    """Check that no trajectory was lost, no step ran twice, and no process or file is left."""
    assert is_conserved(summary), summary
    assert summary["trajectories_failed"] == summary["trajectories_abandoned"] == 0
    assert summary["replay_identical"] is True
    assert [metric["step"] for metric in run.metrics()] == list(range(1, summary["steps"] + 1))
    assert run.list_leftovers() == []


def test_three_hosts_generate_and_execute_and_two_hosts_train(tmp_path: Path, cold: tuple[str, ...]) -> None:
    with Hosts(3) as hosts:
        run = ClusterRun(hosts, tmp_path, *cold, "cluster.nodes=3", "cluster.learner_nodes=2", "rl.steps=2")
        run.join(hosts[1])
        run.join(hosts[2])
        assert_invariants(run, run.finish())
        assert run.list_nodes("node.joined") == [1, 2]
        assert set(run.count_answers("TurnGenerated")) == {"generator-0", "generator-0@1", "generator-0@2"}
        assert set(run.count_answers("CodeFinished")) == {"executor-0", "executor-0@1", "executor-0@2"}
        for generator in ("generator-0@1", "generator-0@2"):
            versions = [entry["version"] for entry in run.read_log_entries("weights.fetched", generator)]
            assert versions == [0, 1, 2]
        assert run.read_log_entries("weights.fetched", "generator-0") == []
        ranks = [run.read_log_entries("step.trained", process) for process in ("learner", "learner-1")]
        assert sum(step["updates"] for step in ranks[1]) > 0
        losses = [[step.get("grad_norm") for step in steps] for steps in ranks]
        assert losses[0] == losses[1]  # all ranks have the norm of the whole gradient


@pytest.mark.nightly
def test_another_host_downloads_the_base_model_of_adapters_once(tmp_path: Path, cold: tuple[str, ...]) -> None:
    settings = ("cluster.nodes=2", "rl.steps=2", "learner.lora.rank=2", "learner.lora.publish=adapters")
    with Hosts(2) as hosts:
        run = ClusterRun(hosts, tmp_path, *cold, *settings)
        run.join(hosts[1])
        assert_invariants(run, run.finish())
        fetched = run.read_log_entries("weights.fetched", "generator-0@1")
        assert [entry["version"] for entry in fetched] == [0, 1, 2]
        served = run.read_log_entries("weights.served", "weights")[-1]["bytes"]
        base = served - sum(entry["bytes"] for entry in fetched)
        assert 4 * 400_000 < base < 4 * 600_000  # one copy of the demo's model in float32
        assert max(entry["bytes"] for entry in fetched) < 0.1 * base


@contextmanager
def training_on_two_hosts(folder: Path, *settings: str) -> Iterator[tuple[Hosts, ClusterRun]]:
    """Start a run on two hosts, and yield after its first step."""
    with Hosts(2) as hosts:
        run = ClusterRun(hosts, folder, *settings, "cluster.nodes=2", "cluster.learner_nodes=2")
        run.join(hosts[1])
        run.wait_until(lambda: run.metrics() != [])
        yield hosts, run


@pytest.mark.nightly
def test_a_partition_shorter_than_the_heartbeat_timeout_loses_no_node(tmp_path: Path, cold: tuple[str, ...]) -> None:
    with training_on_two_hosts(tmp_path, *cold, "supervision.heartbeat_timeout_s=12") as (hosts, run):
        hosts.partition(hosts[1])
        time.sleep(3)
        hosts.heal(hosts[1])
        assert_invariants(run, run.finish())
        assert run.list_nodes("node.joined") == [1]
        assert run.list_nodes("node.left") == []
        assert run.read_log_entries("node.disconnected", "launcher@1") == []


@pytest.mark.nightly
def test_a_node_joins_anew_after_a_partition_beyond_the_timeout(tmp_path: Path, cold: tuple[str, ...]) -> None:
    with training_on_two_hosts(tmp_path, *cold, "supervision.heartbeat_timeout_s=4") as (hosts, run):
        hosts.partition(hosts[1])
        run.wait_until(
            lambda: run.list_nodes("node.left") == [1] and run.read_log_entries("node.ended", "launcher@1") != []
        )
        assert len(run.metrics()) < 3  # the run waits for a second training node
        hosts.heal(hosts[1])
        assert_invariants(run, run.finish())
        assert run.list_nodes("node.joined") == [1, 2]
        assert run.list_nodes("node.left") == [1]
        assert len(run.read_log_entries("node.disconnected", "launcher@1")) == 1
        assert run.count_answers("TurnGenerated")["generator-0@2"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_on_another_node_restarts_the_ranks_of_all_nodes(
    tmp_path: Path, cold: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    for name, value in make_environment([RankFault(1, 2, "save", number)]).items():
        monkeypatch.setenv(name, value)
    settings = (f"learner.loss.function={LOSS}", "supervision.heartbeat_timeout_s=4")
    with training_on_two_hosts(tmp_path, *cold, *settings) as (_, run):
        assert_invariants(run, run.finish())
        assert run.list_nodes("node.left") == []
        (death,) = run.read_log_entries("node.process_died")
        assert (death["name"], death["incarnation"]) == ("learner@1", 1)
        if number == signal.SIGSTOP:
            hang = r"learner rank 1: no heartbeat for .* s, (.*, )?in save of step 2 since .* s"
            assert re.fullmatch(f"learner@1 was killed by signal 9: {hang}", death["cause"])


@pytest.mark.nightly
def test_a_slow_link_delays_a_node_and_loses_nothing(tmp_path: Path, cold: tuple[str, ...]) -> None:
    with Hosts(2) as hosts:
        hosts.slow(hosts[1], delay_ms=50, mbit_per_s=10)
        run = ClusterRun(hosts, tmp_path, *cold, "cluster.nodes=2", "rl.steps=2")
        run.join(hosts[1])
        assert_invariants(run, run.finish())
        assert run.list_nodes("node.left") == []
        assert run.count_answers("TurnGenerated")["generator-0@1"] > 0
        fetched = run.read_log_entries("weights.fetched", "generator-0@1")
        assert [entry["version"] for entry in fetched] == [0, 1, 2]
        # The transfer uses at most the bandwidth of the link.
        assert all(entry["fetch_s"] >= entry["bytes"] * 8 / 10e6 for entry in fetched)


@pytest.mark.nightly
def test_a_killed_node_is_replaced_by_another_node_during_a_step(tmp_path: Path, cold: tuple[str, ...]) -> None:
    with training_on_two_hosts(tmp_path, *cold, "supervision.heartbeat_timeout_s=4") as (hosts, run):
        hosts[1].kill_all()  # the learner's next incarnation waits for another training node
        another = hosts.add()
        run.join(another)
        summary = run.finish(killed=[hosts[1]])
        assert hosts[1].list_processes() == {}
        hosts.power_off(hosts[1])  # the power-off removes the files of killed processes
        assert_invariants(run, summary)
        assert run.list_nodes("node.joined") == [1, 2]
        assert run.list_nodes("node.left") == [1]
        assert run.count_answers("TurnGenerated")["generator-0@2"] > 0
        trained = [entry["step"] for entry in run.read_log_entries("step.trained", "learner-1")]
        assert trained[-1] == summary["steps"]
