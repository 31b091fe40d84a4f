"""Compare scheduling policies on four simulated workloads with two lower bounds. Prints a JSON line last.

    python -m benchmarks.scheduler [--quick] [--workload NAME ...] [--policies NAME,NAME] [--seed 0]

Each policy gets the same step: the same trajectories with the same turns, all requested at time 0.
Times are virtual, except three figures of kv_lookahead on this machine: `simulate_report_s`, the CPU
time of the simulation of `report`; `decisions_per_s`, per CPU second, the median of three replays of
the arbiter's decisions; `worst_decision_ms`, where the fastest of the three replays counts for each
decision. `--quick` uses an eighth of prompts and engines.

The step is the first of a run: kv_lookahead has no lengths of earlier steps. `later_step` is the same step with
the lengths of an earlier step on other problems of the same kind.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

from rich.console import Console

from asterism.analysis.simulation.outcome import SimulatedPolicy, SimulationOutcome
from asterism.analysis.simulation.result_table import build_outcomes_table
from asterism.analysis.simulation.simulate import simulate
from asterism.analysis.simulation.workloads import SHAPES, draw_named_workload
from asterism.policies.arbiter.arbiter import Arbiter, PolicyName
from benchmarks.support.benchmark_main import SEED, Flag, Options, benchmark_main, make_policies_flag
from benchmarks.support.decision_replay import DecisionRecorder, DecisionSpeed

POLICIES: tuple[SimulatedPolicy, ...] = (*get_args(PolicyName), "oracle")
OURS: PolicyName = "kv_lookahead"
QUICK_SCALE = 0.125
SPEED_WORKLOAD = "report"
_EARLIER = 1000  # added to the seed to draw the lengths of an earlier step


def extract_figures(outcome: SimulationOutcome) -> dict[str, Any]:
    return {
        "makespan_s": round(outcome.makespan_s, 2),
        "lower_bound_s": round(outcome.bounds.lower_s, 2),
        "kv_utilization": round(outcome.kv_utilization, 4),
        "slot_utilization": round(outcome.slot_utilization, 4),
        "evictions": outcome.evictions,
        "recomputed_tokens": outcome.recomputed_tokens,
        "preemptions": outcome.preemptions,
        "overflows": outcome.overflows,
        "migrations": outcome.migrations,
    }


def compute_ratios(outcomes: dict[SimulatedPolicy, SimulationOutcome]) -> dict[str, float]:
    """Return the makespans of the other policies relative to the makespan of kv_lookahead."""
    ours = outcomes.get(OURS)
    if ours is None:
        return {}
    others = {policy: outcome for policy, outcome in outcomes.items() if policy != OURS}
    return {policy: round(other.makespan_s / ours.makespan_s, 3) for policy, other in others.items()}


def summarize_speed(ours: Sequence[DecisionSpeed]) -> dict[str, float | None]:
    """Summarize the decisions of kv_lookahead. Trajectories and engines are those of the largest workload."""
    if not ours:
        return dict.fromkeys(("decisions_per_s", "worst_decision_ms", "live_trajectories", "engines"))
    decisions_per_s = sum(each.decisions for each in ours) / sum(each.decided_s for each in ours)
    return {
        "decisions_per_s": round(decisions_per_s),
        "worst_decision_ms": round(1e3 * max(each.worst_s for each in ours), 3),
        "live_trajectories": max(each.live_trajectories for each in ours),
        "engines": max(each.engines for each in ours),
    }


def simulate_later_step(
    outcomes: dict[SimulatedPolicy, SimulationOutcome], seed: int, scale: float
) -> dict[str, float]:
    workload, cluster = draw_named_workload(outcomes[OURS].workload, seed, scale)
    earlier, _ = draw_named_workload(outcomes[OURS].workload, seed + _EARLIER, scale)
    later = simulate(workload, cluster, OURS, seed, earlier=earlier)
    return {
        **extract_figures(later),
        **{f"{name}_times_as_long": ratio for name, ratio in compute_ratios({**outcomes, OURS: later}).items()},
    }


def measure(options: Options) -> dict[str, Any]:
    console = Console()
    outcomes: dict[str, dict[SimulatedPolicy, SimulationOutcome]] = {}
    speeds: list[DecisionSpeed] = []
    later: dict[str, dict[str, float]] = {}
    for name in options.workload or SHAPES:
        scale = QUICK_SCALE if options.quick else 1.0
        workload, cluster = draw_named_workload(name, options.seed, scale)
        ours = DecisionRecorder()
        outcomes[name] = {
            policy: simulate(
                workload, cluster, policy, options.seed, observe=ours.on_decision if policy == OURS else None
            )
            for policy in options.policies
        }
        console.print(build_outcomes_table(list(outcomes[name].values())))
        if OURS in options.policies:
            speeds.append(ours.measure_speed(partial(Arbiter, OURS, workload.response_tokens)))
            later[name] = simulate_later_step(outcomes[name], options.seed, scale)
    report = outcomes.get(SPEED_WORKLOAD, {}).get(OURS)
    return {
        **summarize_speed(speeds),
        "simulate_report_s": None if report is None else round(report.simulated_in_s, 2),
        "seed": options.seed,
        "quick": options.quick,
        "workloads": {
            name: {policy: extract_figures(outcome) for policy, outcome in each.items()}
            for name, each in outcomes.items()
        },
        "later_step": later,
        "times_as_long_as_kv_lookahead": {name: compute_ratios(each) for name, each in outcomes.items()},
    }


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        Flag("--workload", [], "may be repeated; default: all", choices=list(SHAPES)),
        make_policies_flag(POLICIES, POLICIES),
        SEED,
        quick="an eighth of prompts and engines",
    )
