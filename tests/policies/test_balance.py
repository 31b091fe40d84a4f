"""Who moves so that engines end together, with engines whose costs are known."""

from __future__ import annotations

import numpy as np
import pytest

from policies.balance import Balance
from policies.forecast import Forecast
from policies.ledger import Engine
from policies.step_costs import Costs
from tests.policies.leases import joined, reports

LIMIT = 10_000
TOKENS, TO_GO = 1000, 2000.0  # 4 million cached tokens are read for it still
READS = Costs(step=1e-4, read=1e-6, prefill=1e-5)


class Cluster:
    """Engines with so many equal trajectories each, which have just been measured."""

    def __init__(self, *trajectories: int, costs: Costs = READS) -> None:
        self.balance = Balance()
        teacher = Engine(joined(99))
        for report in reports(costs, 60, engine=teacher.name):
            teacher.report = report
            self.balance.measured(teacher, Forecast(LIMIT))
        self.balance.left(teacher)
        self.engines = [Engine(joined(number)) for number in range(len(trajectories))]
        for number, members in enumerate(trajectories):
            self.measured(number, members)

    def measured(self, number: int, members: int) -> None:
        forecast = Forecast(LIMIT)
        for tid in range(members):
            forecast.put(tid, TOKENS, TOKENS, TOKENS + TO_GO, np.ones(64))
        self.balance.measured(self.engines[number], forecast)

    def better(self, number: int, tokens: int = TOKENS, to_go: float = TO_GO) -> str | None:
        return self.balance.better(self.engines[number].name, tokens, to_go)

    def move(self, number: int, to: str) -> None:
        self.balance.moved(self.engines[number].name, to, TOKENS, TO_GO)


def test_one_moves_from_the_engine_that_ends_late_to_the_one_that_ends_first() -> None:
    cluster = Cluster(10, 4, 2)
    assert cluster.better(0) == "generator-2"
    assert cluster.better(2) is None


def test_nobody_moves_for_a_small_gain() -> None:
    assert Cluster(10, 7).better(0) is None  # there would be 8 of 10
    assert Cluster(10, 5).better(0) == "generator-1"


def test_nobody_moves_to_an_engine_that_would_then_end_as_late() -> None:
    assert Cluster(2, 1).better(0) is None
    assert Cluster(2, 1).better(0, tokens=1000, to_go=100.0) == "generator-1"


def test_nobody_moves_whose_cache_takes_longer_to_compute_anew_than_its_steps_still_read() -> None:
    cluster = Cluster(10, 2)
    assert cluster.better(0, tokens=5000, to_go=4.0) is None  # 0.02 s to read, 0.05 s to compute
    assert cluster.better(0, tokens=5000, to_go=40.0) == "generator-1"
    dear = Cluster(10, 2, costs=READS._replace(prefill=1e-2))
    assert dear.better(0) is None


def test_where_nothing_is_known_of_costs_nobody_moves() -> None:
    cluster = Cluster(costs=Costs(0.0, 0.0, 0.0))
    for number in range(2):
        cluster.engines.append(Engine(joined(number)))
        cluster.measured(number, 10 - 9 * number)
    assert cluster.better(0) is None


def test_the_next_one_is_judged_with_those_that_have_moved_already() -> None:
    cluster = Cluster(10, 0)
    moved = 0
    while (to := cluster.better(0)) is not None:
        cluster.move(0, to)
        moved += 1
        assert moved < 10
    assert 2 <= moved <= 5  # (10 - moved) * 0.7 > moved
    assert cluster.better(1) is None


def test_what_moved_is_counted_until_the_engine_is_measured_again() -> None:
    cluster = Cluster(10, 4)
    for _ in range(2):
        cluster.move(0, "generator-1")
    assert cluster.better(0) is None
    cluster.measured(1, 2)
    assert cluster.better(0) == "generator-1"


@pytest.mark.parametrize("left", [0, 1])
def test_an_engine_that_has_left_is_nobody_s_choice_and_has_nobody_to_give_away(left: int) -> None:
    cluster = Cluster(10, 1)
    cluster.balance.left(cluster.engines[left])
    assert cluster.better(0) is None


def test_an_engine_with_one_very_long_trajectory_ends_when_that_does() -> None:
    """Where steps take their time however little they read, who has the longest to go ends last."""
    steps = Costs(step=1e-2, read=1e-9, prefill=1e-9)
    assert Cluster(1, 1, costs=steps).better(0, to_go=100.0) is None
    cluster = Cluster(1, 0, costs=steps)
    assert cluster.better(0, to_go=2000.0) is None  # it would be the last there as well
