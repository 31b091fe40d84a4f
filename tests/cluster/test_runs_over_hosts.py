"""Runs of the tiny recipe over several hosts, with what happens to networks and machines: each run finishes, and adds up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.actors.running import COLD_START, adds_up, from_cold_start_of, whole_run
from tests.cluster.hosts import Hosts
from tests.cluster.running import ClusterRun

pytestmark = [pytest.mark.slow, pytest.mark.hosts, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings with which a run begins where all of these do."""
    runs = tmp_path_factory.mktemp("cold")
    return from_cold_start_of(whole_run(runs, *COLD_START, "rl.steps=0", "evaluation.questions=0")[0])


def assert_whole(run: ClusterRun, summary: dict[str, Any]) -> None:
    """Nothing was lost, nothing happened twice, and nothing is left."""
    assert adds_up(summary), summary
    assert summary["trajectories_failed"] == summary["trajectories_abandoned"] == 0
    assert summary["replay_identical"] is True
    assert [metric["step"] for metric in run.metrics()] == list(range(1, summary["steps"] + 1))
    assert run.left_over() == []


def test_three_hosts_generate_and_execute_two_of_them_train(tmp_path: Path, cold: tuple[str, ...]) -> None:
    with Hosts(3) as hosts:
        run = ClusterRun(hosts, tmp_path, *cold, "cluster.nodes=3", "cluster.learner_nodes=2")
        run.join(hosts[1])
        run.join(hosts[2])
        assert_whole(run, run.finish())
        assert run.nodes("node.joined") == [1, 2]
        assert set(run.answers("TurnGenerated")) == {"generator-0", "generator-0@1", "generator-0@2"}
        assert set(run.answers("CodeFinished")) == {"executor-0", "executor-0@1", "executor-0@2"}
        for generator in ("generator-0@1", "generator-0@2"):
            versions = [entry["version"] for entry in run.said("weights.fetched", generator)]
            assert versions == [0, 1, 2, 3]
        assert run.said("weights.fetched", "generator-0") == []
        ranks = [run.said("step.trained", process) for process in ("learner", "learner-1")]
        assert sum(step["updates"] for step in ranks[1]) > 0
        losses = [[step.get("grad_norm") for step in steps] for steps in ranks]
        assert losses[0] == losses[1]  # both have the whole gradient


def test_a_partition_that_is_shorter_than_the_patience_with_silence_loses_nobody(
    tmp_path: Path, cold: tuple[str, ...]
) -> None:
    with Hosts(2) as hosts:
        run = ClusterRun(
            hosts, tmp_path, *cold, "cluster.nodes=2", "cluster.learner_nodes=2", "supervision.silent_s=12"
        )
        run.join(hosts[1])
        run.until(lambda: run.metrics() != [])
        hosts.partition(hosts[1])
        time.sleep(3)
        hosts.heal(hosts[1])
        assert_whole(run, run.finish())
        assert run.nodes("node.joined") == [1]
        assert run.nodes("node.left") == []
        assert run.said("node.cut_off", "launcher@1") == []


def test_a_node_that_was_cut_off_for_longer_is_lost_and_comes_back_as_another_one(
    tmp_path: Path, cold: tuple[str, ...]
) -> None:
    with Hosts(2) as hosts:
        run = ClusterRun(hosts, tmp_path, *cold, "cluster.nodes=2", "cluster.learner_nodes=2", "supervision.silent_s=4")
        run.join(hosts[1])
        run.until(lambda: run.metrics() != [])
        hosts.partition(hosts[1])
        run.until(lambda: run.nodes("node.left") == [1] and run.said("node.ended", "launcher@1") != [])
        assert len(run.metrics()) < 3  # the run waits for a second node that trains
        hosts.heal(hosts[1])
        assert_whole(run, run.finish())
        assert run.nodes("node.joined") == [1, 2]
        assert run.nodes("node.left") == [1]
        assert len(run.said("node.cut_off", "launcher@1")) == 1
        assert run.answers("TurnGenerated")["generator-0@2"] > 0


def test_a_slow_link_holds_a_node_up_and_loses_nothing(tmp_path: Path, cold: tuple[str, ...]) -> None:
    with Hosts(2) as hosts:
        hosts.slow(hosts[1], delay_ms=50, mbit_per_s=10)
        run = ClusterRun(hosts, tmp_path, *cold, "cluster.nodes=2", "rl.steps=2")
        run.join(hosts[1])
        assert_whole(run, run.finish())
        assert run.nodes("node.left") == []
        assert run.answers("TurnGenerated")["generator-0@1"] > 0
        fetched = run.said("weights.fetched", "generator-0@1")
        assert [entry["version"] for entry in fetched] == [0, 1, 2]
        assert all(entry["fetch_s"] >= entry["bytes"] * 8 / 10e6 for entry in fetched)  # no link is faster than it is


def test_a_node_is_killed_as_a_whole_and_another_one_joins_in_the_middle_of_a_step(
    tmp_path: Path, cold: tuple[str, ...]
) -> None:
    with Hosts(2) as hosts:
        run = ClusterRun(hosts, tmp_path, *cold, "cluster.nodes=2", "cluster.learner_nodes=2", "supervision.silent_s=4")
        run.join(hosts[1])
        run.until(lambda: run.metrics() != [])
        hosts[1].kill_all()  # the learner's next life waits for another node that trains
        another = hosts.add()
        run.join(another)
        summary = run.finish(killed=[hosts[1]])
        assert hosts[1].processes() == {}
        hosts.power_off(hosts[1])  # what nobody was left to remove goes with it
        assert_whole(run, summary)
        assert run.nodes("node.joined") == [1, 2]
        assert run.nodes("node.left") == [1]
        assert run.answers("TurnGenerated")["generator-0@2"] > 0
        trained = [entry["step"] for entry in run.said("step.trained", "learner-1")]
        assert trained[-1] == summary["steps"]
