"""Migrations between engines with known costs."""

import numpy as np
import pytest

from asterism.policies.arbiter.decode_cost import CostCoefficients
from asterism.policies.arbiter.kv_demand import KvDemandForecast
from asterism.policies.arbiter.kv_ledger import EngineAccount
from asterism.policies.arbiter.rebalancing import Rebalancer
from tests.policies.arbiter.leases import joined, reports

LIMIT = 10_000
TOKENS, REMAINING = 1000, 2000.0  # 2000 steps after 1000 tokens read 4 million cached tokens
READS = CostCoefficients(step=1e-4, read=1e-6, prefill=1e-5)


class Cluster:
    """A cluster of engines that run equal trajectories and have just reported their loads."""

    def __init__(self, *trajectories: int, costs: CostCoefficients = READS) -> None:
        self.balance = Rebalancer()
        teacher = EngineAccount(joined(99))
        for report in reports(costs, 60, engine=teacher.name):
            teacher.report = report
            self.balance.on_load_reported(teacher, KvDemandForecast(LIMIT))
        self.balance.on_engine_left(teacher)
        self.engines = [EngineAccount(joined(number)) for number in range(len(trajectories))]
        for number, members in enumerate(trajectories):
            self.report_load(number, members)

    def report_load(self, number: int, members: int) -> None:
        forecast = KvDemandForecast(LIMIT)
        for tid in range(members):
            forecast.update(tid, TOKENS, TOKENS, TOKENS + REMAINING, np.ones(64))
        self.balance.on_load_reported(self.engines[number], forecast)

    def find_target(self, number: int, tokens: int = TOKENS, remaining_tokens: float = REMAINING) -> str | None:
        return self.balance.find_migration_target(self.engines[number].name, tokens, remaining_tokens)

    def move(self, number: int, to: str) -> None:
        self.balance.on_migrated(self.engines[number].name, to, TOKENS, REMAINING)


def test_a_trajectory_migrates_from_the_slowest_engine_to_the_fastest() -> None:
    cluster = Cluster(10, 4, 2)
    assert cluster.find_target(0) == "generator-2"
    assert cluster.find_target(2) is None


def test_no_trajectory_migrates_for_a_small_gain() -> None:
    assert Cluster(10, 7).find_target(0) is None  # 8 of 10 trajectories would remain
    assert Cluster(10, 5).find_target(0) == "generator-1"


def test_no_trajectory_migrates_if_the_target_would_finish_no_earlier() -> None:
    assert Cluster(2, 1).find_target(0) is None
    assert Cluster(2, 1).find_target(0, tokens=1000, remaining_tokens=100.0) == "generator-1"


def test_no_trajectory_migrates_if_recomputation_costs_more_than_the_migration_saves() -> None:
    cluster = Cluster(10, 2)
    assert cluster.find_target(0, tokens=5000, remaining_tokens=4.0) is None  # it would save 0.02 s and cost 0.05 s
    assert cluster.find_target(0, tokens=5000, remaining_tokens=40.0) == "generator-1"
    dear = Cluster(10, 2, costs=READS._replace(prefill=1e-2))
    assert dear.find_target(0) is None


def test_without_known_costs_no_trajectory_migrates() -> None:
    cluster = Cluster(costs=CostCoefficients(0.0, 0.0, 0.0))
    for number in range(2):
        cluster.engines.append(EngineAccount(joined(number)))
        cluster.report_load(number, 10 - 9 * number)
    assert cluster.find_target(0) is None


def test_the_next_decision_includes_earlier_migrations() -> None:
    cluster = Cluster(10, 0)
    moved = 0
    while (to := cluster.find_target(0)) is not None:
        cluster.move(0, to)
        moved += 1
        assert moved < 10
    assert 2 <= moved <= 5  # migrations continue while (10 - moved) * 0.7 > moved
    assert cluster.find_target(1) is None


def test_migrations_count_until_the_next_load_report() -> None:
    cluster = Cluster(10, 4)
    for _ in range(2):
        cluster.move(0, "generator-1")
    assert cluster.find_target(0) is None
    cluster.report_load(1, 2)
    assert cluster.find_target(0) == "generator-1"


@pytest.mark.parametrize("left", [0, 1])
def test_an_engine_that_has_left_is_neither_source_nor_target(left: int) -> None:
    cluster = Cluster(10, 1)
    cluster.balance.on_engine_left(cluster.engines[left])
    assert cluster.find_target(0) is None


def test_an_engine_finishes_with_its_longest_trajectory() -> None:
    """With a fixed cost per step, the engine with the longest trajectory finishes last."""
    steps = CostCoefficients(step=1e-2, read=1e-9, prefill=1e-9)
    assert Cluster(1, 1, costs=steps).find_target(0, remaining_tokens=100.0) is None
    cluster = Cluster(1, 0, costs=steps)
    assert cluster.find_target(0, remaining_tokens=2000.0) is None  # the target would then finish last
