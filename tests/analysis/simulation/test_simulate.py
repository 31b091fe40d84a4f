"""A simulated step: every trajectory ends once, nothing is lost or invented, and no schedule beats the bounds."""

from functools import cache
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from asterism.analysis.simulation.calibration import LoadInterval, build_load_intervals, fit_costs
from asterism.analysis.simulation.cluster_model import H100, QWEN3_14B, build_cluster
from asterism.analysis.simulation.outcome import SimulatedPolicy, SimulationOutcome
from asterism.analysis.simulation.result_table import build_outcomes_table
from asterism.analysis.simulation.simulate import Deadlock, Simulation, simulate
from asterism.analysis.simulation.workload import WorkloadShape, draw_workload
from asterism.bus.messages import EngineLoadReported, LeaseGranted
from asterism.policies.arbiter.arbiter import PolicyName
from tests.consoles import capture

POLICIES: tuple[SimulatedPolicy, ...] = (*get_args(PolicyName), "oracle")
LEASING: tuple[SimulatedPolicy, ...] = ("worst_case", "kv_lookahead", "oracle")
SHAPE = WorkloadShape(
    *("test", 4, 5, 300.0, 0.5, 0.5, 1.5),
    time_out_share=0.1,
    prompt_tokens=90.0,
    response_tokens=1500,
    result_tokens=40.0,
)
WORKLOAD = draw_workload(SHAPE, 7)
CLUSTER = msgspec.structs.replace(build_cluster(QWEN3_14B, H100, 2), kv_tokens=2000)


@cache
def outcome(policy: SimulatedPolicy) -> SimulationOutcome:
    return simulate(WORKLOAD, CLUSTER, policy, seed=7)


def untimed(outcome: SimulationOutcome) -> SimulationOutcome:
    return msgspec.structs.replace(outcome, decision_s=0.0, simulated_in_s=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_trajectory_ends_once_with_its_planned_tokens(policy: SimulatedPolicy) -> None:
    simulation = Simulation(WORKLOAD, CLUSTER, policy)
    simulation.run()
    assert simulation.failed == 0
    ended = {number: len(finished.record.loss_mask) for number, (_, finished) in simulation.finished.items()}
    assert ended == {plan.trajectory_id: plan.final_tokens for plan in WORKLOAD.plans}
    generated = sum(sum(finished.record.loss_mask) for _, finished in simulation.finished.values())
    assert generated == WORKLOAD.generated_tokens == outcome(policy).generated_tokens
    for engine in simulation.engines.values():
        assert engine.used_pages == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_bounds(policy: SimulatedPolicy) -> None:
    assert outcome(policy).makespan_s > outcome(policy).bounds.lower_s > 0


@pytest.mark.parametrize("policy", LEASING)
def test_engines_do_not_evict_unless_a_policy_oversells(policy: SimulatedPolicy) -> None:
    assert outcome(policy).most_kv <= 1
    assert (outcome(policy).overflows, outcome(policy).evictions, outcome(policy).preemptions) == (0, 0, 0)


@pytest.mark.parametrize("policy", ("static", "least_requests"))
def test_engines_evict_and_recompute_under_policies_that_oversell(policy: SimulatedPolicy) -> None:
    assert outcome(policy).evictions > 0
    assert outcome(policy).recomputed_tokens > 0


@pytest.mark.parametrize("policy", ("static", "kv_lookahead"))
def test_a_simulation_is_deterministic(policy: SimulatedPolicy) -> None:
    assert untimed(simulate(WORKLOAD, CLUSTER, policy, seed=7)) == untimed(outcome(policy))


def test_waits_add_up_to_the_time_of_trajectories() -> None:
    simulation = Simulation(WORKLOAD, CLUSTER, "kv_lookahead")
    simulation.run()
    lived_s = sum(at for at, _ in simulation.finished.values())
    assert sum(outcome("kv_lookahead").waits_s.values()) == pytest.approx(lived_s, rel=0.01)  # messages are not counted


class _LostGrants(Simulation):
    """A simulation that loses all grants of leases."""

    def _record_lease(self, granted: LeaseGranted) -> None:
        self.rollout.trajectories.pop(granted.trajectory_id)
        self._receivers["rollout-0"] = lambda _: None


def test_a_deadlock_is_an_error_that_names_the_stuck_trajectories() -> None:
    with pytest.raises(Deadlock, match="trajectories are stuck"):
        _LostGrants(WORKLOAD, CLUSTER, "worst_case").run()


def test_an_engine_that_cannot_hold_the_longest_trajectory_is_refused() -> None:
    with pytest.raises(ValueError, match="a trajectory may need"):
        simulate(WORKLOAD, msgspec.structs.replace(CLUSTER, kv_tokens=1500), "static")


def test_calibration_recovers_the_costs_of_a_simulated_engine() -> None:
    reports: list[EngineLoadReported] = []
    linear = msgspec.structs.replace(CLUSTER.cost, weights_s=0.0, token_s=0.0, pair_s=0.0, prefill_token_s=5e-5)
    cluster = msgspec.structs.replace(CLUSTER, cost=linear, kv_tokens=50_000, page_tokens=1)

    class Listening(Simulation):
        def report_load(self, report: EngineLoadReported) -> None:
            reports.append(report)
            super().report_load(report)

    longer = draw_workload(msgspec.structs.replace(SHAPE, mean_calls=0.2, median_tokens=800.0), 3)
    Listening(longer, cluster, "static").run()
    found = fit_costs(build_load_intervals(reports))
    assert found.fixed_s == pytest.approx(linear.fixed_s, rel=0.2)
    assert found.kv_token_s == pytest.approx(linear.kv_token_s, rel=0.2)


def test_exact_rows_give_exact_and_non_negative_costs() -> None:
    rows = [
        LoadInterval(0.01 * n + 2e-4 * n * running, n, n * running, 50.0 * running, 0)
        for n, running in ((5, 3), (9, 8), (20, 1), (30, 5), (3, 30))
    ]
    found = fit_costs(rows)
    assert found.compute_constant_s(10) + found.kv_token_s * 500 == pytest.approx(0.012)
    assert min(found.fixed_s, found.sequence_s, found.kv_token_s, found.prefill_token_s) >= 0


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit_costs([LoadInterval(1.0, 10, 10, 10.0, 0)] * 2)


def test_the_table_names_every_policy_and_the_bounds() -> None:
    table = build_outcomes_table([outcome("static"), outcome("kv_lookahead")])
    text = capture(lambda console: console.print(table))
    assert "kv_lookahead" in text
    assert f"No schedule ends before {outcome('static').bounds.lower_s:.1f} s" in text


@pytest.mark.slow
def test_the_figure_is_drawn(tmp_path: Path) -> None:
    from asterism.analysis.simulation.simulation_figure import draw_outcomes  # the import of matplotlib takes a second

    assert draw_outcomes([outcome("static"), outcome("kv_lookahead")], tmp_path / "step.png").stat().st_size > 10_000
