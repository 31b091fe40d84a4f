"""Compare the simulator with real runs of two embedded engines with scarce KV cache. Prints a JSON line last.

    python -m benchmarks.validation [--policies kv_lookahead,least_requests,static] [--share 0.33]
                                    [--steps 3] [--quick]

A first run on the tiny task, over real processes, measures the demand for KV cache. Its cold start
is too short for a good model: some answers are short, some call tools, and some reach the token
limit. Each policy then has a run from this checkpoint with small caches. The benchmark simulates
each step of that run from its event log, under the same policy, with costs calibrated from its
engines' reports.

Keys of each policy: `measured_s` and `predicted_s` of each step, `ratio` of their sums,
`worst_ratio` of a single step, mean `waits_s` of a trajectory, and the engines' token counts.
Waits and token counts have a measured and a predicted value.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from msgspec.structs import replace

from asterism.analysis.simulation.outcome import SimulationOutcome
from asterism.analysis.simulation.recorded_workload import RecordedStep, load_recorded_step
from asterism.analysis.simulation.simulate import simulate
from asterism.analysis.utilization.report import compute_utilization
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.arbiter.arbiter import PolicyName
from benchmarks.support.benchmark_main import SEED, Flag, Options, benchmark_main, make_policies_flag
from benchmarks.support.tiny_run import from_checkpoint, launch

CONFIG = Path("configs/tiny.toml")
ENGINES = 2
COLD_START = ("sft.steps=50", "sft.batch_size=32", "prepare.parameters.num_sft_dialogues=3200", "name=cold")
SETTINGS = (
    *(
        "sandbox.backend=process",
        f"engine.num_engines={ENGINES}",
        "learner.threads=1",
        "evaluation.questions=0",
    ),
    *("rl.prompts=16", "rl.rollouts=16", "dialogue.response_tokens=480"),
)
POLICIES: tuple[PolicyName, ...] = ("kv_lookahead", "least_requests", "static")


def start_cold_run(settings: Sequence[str], runs: Path) -> RunFolder:
    """Run a cold start, and one step for which the caches are large enough."""
    run = load_run(CONFIG, [*settings, *COLD_START, "rl.steps=1"])
    return launch(replace(run, runs_folder=str(runs)))


def shrink_caches(run: RunConfig, demand_tokens: int, share: float) -> RunConfig:
    """Return `run` with caches of the engines for this share of the demand."""
    least = run.sequence_tokens + run.engine.page_tokens
    kv_tokens = max(least, round(share * demand_tokens / ENGINES))
    return replace(run, engine=replace(run.engine, kv_tokens=kv_tokens))


def simulate_steps(folder: RunFolder, steps: int) -> list[tuple[RecordedStep, SimulationOutcome]]:
    """Compare each step of a recorded run with its simulation."""
    recorded = [load_recorded_step(folder, step) for step in range(1, steps + 1)]
    return [(each, simulate(each.workload, each.cluster, each.policy)) for each in recorded]


def compute_figures(pairs: Sequence[tuple[RecordedStep, SimulationOutcome]], logs: Path) -> dict[str, Any]:
    measured = [each.measured_s for each, _ in pairs]
    predicted = [outcome.makespan_s for _, outcome in pairs]
    ratios = [there / here for here, there in zip(measured, predicted, strict=True)]
    told = compute_utilization(logs)
    counters = {
        "prefilled_tokens": "prefilled_tokens",
        "evicted_tokens": "evicted_tokens",
        "recomputed_tokens": "recomputed_tokens",
        "preempted": "preemptions",
    }
    return {
        "ratio": round(sum(predicted) / sum(measured), 4),
        "worst_ratio": round(max(ratios, key=lambda ratio: abs(ratio - 1)), 4),
        "measured_s": [round(seconds, 3) for seconds in measured],
        "predicted_s": [round(seconds, 3) for seconds in predicted],
        "latency_ms": [round(1e3 * each.cluster.latency_s, 2) for each, _ in pairs],
        "waits_s": {name: round(wait.mean_s, 3) for name, wait in told.trajectories.waits.items()},
        "waits_s_predicted": _sum_waits_s([outcome for _, outcome in pairs]),
        **{name: sum(getattr(engine, name) for engine in told.engines) for name in counters},
        **{f"{name}_predicted": sum(getattr(each, key) for _, each in pairs) for name, key in counters.items()},
    }


def _sum_waits_s(outcomes: Sequence[SimulationOutcome]) -> dict[str, float]:
    trajectories = sum(outcome.trajectories for outcome in outcomes)
    causes = {
        "lease_wait_s": ("lease to begin", "lease after a tool", "lease within a turn"),
        "generation_s": ("engine's queue", "prefill", "decode"),
        "tools_s": ("tools",),
        "grading_s": ("grading",),
    }
    return {
        name: round(sum(outcome.waits_s[each] for outcome in outcomes for each in parts) / trajectories, 3)
        for name, parts in causes.items()
    }


def measure(options: Options) -> dict[str, Any]:
    runs = options.keep or options.scratch
    settings, steps = (*SETTINGS, f"seed={options.seed}"), options.steps
    cold = start_cold_run(settings, runs)
    demand_tokens = load_recorded_step(cold, 1).workload.demand_tokens
    found: dict[str, Any] = {}
    for policy in options.policies:
        own = (*settings, f"arbiter.policy={policy}", f"name={policy}")
        run = replace(from_checkpoint(CONFIG, own, cold.get_checkpoint_path(0), steps), runs_folder=str(runs))
        folder = launch(shrink_caches(run, demand_tokens, options.share))
        found[policy] = compute_figures(simulate_steps(folder, steps), folder.logs)
        print(f"{policy}: {json.dumps(found[policy])}", flush=True)
    fixed = {"share": options.share, "demand_tokens": demand_tokens, "steps": steps, "seed": options.seed}
    return {**fixed, "policies": found}


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        make_policies_flag(POLICIES, get_args(PolicyName), quick=POLICIES[:1]),
        Flag("--share", 0.33, "share of the demand that fits into the caches"),
        Flag("--steps", 3, "steps of each run", quick=1),
        SEED,
        Flag("--keep", kind=Path, metavar="FOLDER", text="keep the runs in this folder"),
        quick="one step under one policy",
    )
