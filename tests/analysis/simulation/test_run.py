"""A simulated step: every trajectory ends once, nothing is lost or invented, and no schedule beats the bounds."""

from __future__ import annotations

from functools import cache
from io import StringIO
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from rich.console import Console

from analysis.simulation.calibration import LoadRow, calibrated, rows_of
from analysis.simulation.model import H100, QWEN3_14B, cluster_of
from analysis.simulation.outcome import Outcome, Policy
from analysis.simulation.run import Deadlock, Simulation, simulate
from analysis.simulation.table import outcomes_table
from analysis.simulation.workload import Shape, Workload, draw
from bus.messages import EngineLoadReported, LeaseGranted
from policies.scheduling import PolicyName

POLICIES: tuple[Policy, ...] = (*get_args(PolicyName), "oracle")
LEASING: tuple[Policy, ...] = ("kv", "kv_lookahead", "oracle")
SHAPE = Shape(
    *("test", 4, 5, 300.0, 0.5, 0.5, 1.5),
    time_out_share=0.1,
    prompt_tokens=90.0,
    response_tokens=1500,
    result_tokens=40.0,
)
WORKLOAD = draw(SHAPE, 7)
CLUSTER = msgspec.structs.replace(cluster_of(QWEN3_14B, H100, 2), kv_tokens=2000)


@cache
def outcome(policy: Policy) -> Outcome:
    return simulate(WORKLOAD, CLUSTER, policy, seed=7)


def untimed(outcome: Outcome) -> Outcome:
    return msgspec.structs.replace(outcome, decision_s=0.0, simulated_in_s=0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_trajectory_ends_once_with_the_tokens_that_the_workload_says(policy: Policy) -> None:
    simulation = Simulation(WORKLOAD, CLUSTER, policy)
    simulation.run()
    assert simulation.failed == 0
    ended = {number: len(finished.loss_mask) for number, (_, finished) in simulation.finished.items()}
    assert ended == {plan.trajectory_id: plan.final_tokens for plan in WORKLOAD.plans}
    generated = sum(sum(finished.loss_mask) for _, finished in simulation.finished.values())
    assert generated == WORKLOAD.generated_tokens == outcome(policy).generated_tokens
    for engine in simulation.engines.values():
        assert engine.pages.used == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_bounds(policy: Policy) -> None:
    assert outcome(policy).makespan_s > outcome(policy).bounds.lower_s > 0


@pytest.mark.parametrize("policy", LEASING)
def test_where_leases_are_kept_no_engine_ever_makes_room_by_itself(policy: Policy) -> None:
    assert outcome(policy).most_kv <= 1
    assert (outcome(policy).overflows, outcome(policy).evictions, outcome(policy).preemptions) == (0, 0, 0)


@pytest.mark.parametrize("policy", ("static", "least_requests"))
def test_where_they_are_not_engines_evict_and_compute_again(policy: Policy) -> None:
    assert outcome(policy).evictions > 0
    assert outcome(policy).recomputed_tokens > 0


@pytest.mark.parametrize("policy", ("static", "kv_lookahead"))
def test_the_same_step_simulates_the_same(policy: Policy) -> None:
    assert untimed(simulate(WORKLOAD, CLUSTER, policy, seed=7)) == untimed(outcome(policy))


def test_a_trajectory_s_time_is_all_accounted_for() -> None:
    simulation = Simulation(WORKLOAD, CLUSTER, "kv_lookahead")
    simulation.run()
    lived_s = sum(at for at, _ in simulation.finished.values())
    assert sum(outcome("kv_lookahead").waits_s.values()) == pytest.approx(lived_s, rel=0.01)  # but for messages


class _Miser(Simulation):
    """Its arbiter's grants are lost on the way."""

    def _note_lease(self, granted: LeaseGranted) -> None:
        self.rollout.trajectories.pop(granted.trajectory_id)
        self._receivers["rollout-0"] = lambda _: None


def test_a_step_that_comes_to_a_standstill_is_an_error_that_says_who_waits() -> None:
    with pytest.raises(Deadlock, match="wait for ever"):
        _Miser(WORKLOAD, CLUSTER, "kv").run()


def test_an_engine_that_cannot_hold_the_longest_trajectory_is_refused() -> None:
    with pytest.raises(ValueError, match="a trajectory may need"):
        simulate(WORKLOAD, msgspec.structs.replace(CLUSTER, kv_tokens=1500), "static")


def test_costs_are_found_again_from_a_simulated_engine_s_reports() -> None:
    reports: list[EngineLoadReported] = []
    linear = msgspec.structs.replace(CLUSTER.cost, weights_s=0.0, token_s=0.0, pair_s=0.0, prefill_token_s=5e-5)
    cluster = msgspec.structs.replace(CLUSTER, cost=linear, kv_tokens=50_000, page_tokens=1)

    class Listening(Simulation):
        def load(self, report: EngineLoadReported) -> None:
            reports.append(report)
            super().load(report)

    Listening(_longer(), cluster, "static").run()
    found = calibrated(rows_of(reports))
    assert found.fixed_s == pytest.approx(linear.fixed_s, rel=0.2)
    assert found.kv_token_s == pytest.approx(linear.kv_token_s, rel=0.2)


def _longer() -> Workload:
    return draw(msgspec.structs.replace(SHAPE, mean_calls=0.2, median_tokens=800.0), 3)


def test_exact_rows_give_exact_costs_and_none_is_negative() -> None:
    rows = [
        LoadRow(0.01 * n + 2e-4 * n * running, n, n * running, 50.0 * running, 0)
        for n, running in ((5, 3), (9, 8), (20, 1), (30, 5), (3, 30))
    ]
    found = calibrated(rows)
    assert found.constant_s(10) + found.kv_token_s * 500 == pytest.approx(0.012)
    assert min(found.fixed_s, found.sequence_s, found.kv_token_s, found.prefill_token_s) >= 0


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        calibrated([LoadRow(1.0, 10, 10, 10.0, 0)] * 2)


def test_the_table_names_every_policy_and_the_bounds() -> None:
    console = Console(width=140, file=StringIO())
    console.print(outcomes_table([outcome("static"), outcome("kv_lookahead")]))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "kv_lookahead" in text
    assert f"No schedule ends before {outcome('static').bounds.lower_s:.1f} s" in text


@pytest.mark.slow
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    from analysis.simulation.picture import draw_outcomes  # takes a second: not for those who only collect

    assert draw_outcomes([outcome("static"), outcome("kv_lookahead")], tmp_path / "step.png").stat().st_size > 10_000
