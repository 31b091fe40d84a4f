"""The simulator beside real runs: two embedded engines whose caches hold a part of the demand. JSON last.

    python -m benchmarks.validation [--policies kv_lookahead,least_requests,static] [--share 0.33] [--steps 4]

For each policy a run on the tiny task over real processes is recorded, from one cold start for all. Each of its steps is
then simulated from its event log, with costs calibrated from its engines' reports, under the policy that it had. Keys, for
each policy: `measured_s` and `predicted_s` of each step, `ratio` of their sums, `worst_ratio` of a single step's, and what
the engines did in these steps: `evicted_tokens`, `recomputed_tokens` and `preempted`, measured and predicted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

from msgspec.structs import replace

from analysis.simulation.outcome import Outcome
from analysis.simulation.recorded import RecordedStep, recorded_step
from analysis.simulation.run import simulate
from analysis.utilization.report import utilization_of
from benchmarks._tiny_run import cold_start, from_checkpoint, launch
from configs.run_folder import RunFolder
from configs.schema import Run
from policies.scheduling import PolicyName

CONFIG = Path("configs/tiny.toml")
COLD_START = ("sft.steps=150", "sft.batch_size=32", "tiny.num_sft_dialogues=4800")
SETTINGS = ("sandbox.backend=process", "engine.num_engines=2", "learner.threads=1", "rl.prompts=16", "rl.rollouts=16")
TRAJECTORY_TOKENS = 112  # of a dialogue of the tiny task at its end, in whole pages
POLICIES: tuple[PolicyName, ...] = ("kv_lookahead", "least_requests", "static")


def with_caches(run: Run, share: float) -> Run:
    """Two engines that together hold such a share of what all trajectories of a step come to."""
    demand_tokens = run.rl.prompts * run.rl.rollouts * TRAJECTORY_TOKENS
    kv_tokens = max(run.dialogue.sequence_tokens + run.engine.page_tokens, round(share * demand_tokens / 2))
    return replace(run, engine=replace(run.engine, kv_tokens=kv_tokens))


def compared(folder: RunFolder, steps: int) -> list[tuple[RecordedStep, Outcome]]:
    """Each step of a recorded run beside its simulation."""
    recorded = [recorded_step(folder, step) for step in range(1, steps + 1)]
    return [(each, simulate(each.workload, each.cluster, each.policy)) for each in recorded]


def figures(pairs: Sequence[tuple[RecordedStep, Outcome]], logs: Path) -> dict[str, Any]:
    measured = [each.measured_s for each, _ in pairs]
    predicted = [outcome.makespan_s for _, outcome in pairs]
    ratios = [there / here for here, there in zip(measured, predicted, strict=True)]
    engines = utilization_of(logs).engines
    counters = {
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
        **{name: sum(getattr(engine, name) for engine in engines) for name in counters},
        **{f"{name}_predicted": sum(getattr(each, key) for _, each in pairs) for name, key in counters.items()},
    }


def measure(policies: Sequence[PolicyName], share: float, steps: int, seed: int, runs: Path) -> dict[str, Any]:
    settings = (*SETTINGS, f"seed={seed}")
    checkpoint = cold_start(CONFIG, (*settings, *COLD_START), runs)
    found: dict[str, Any] = {}
    for policy in policies:
        run = from_checkpoint(CONFIG, (*settings, f"arbiter.policy={policy}", f"name={policy}"), checkpoint, steps)
        folder = launch(with_caches(replace(run, runs_folder=str(runs)), share))
        found[policy] = figures(compared(folder, steps), folder.logs)
        print(f"{policy}: {json.dumps(found[policy])}", flush=True)
    return {"share": share, "steps": steps, "seed": seed, "policies": found}


def _policies(names: str) -> tuple[PolicyName, ...]:
    chosen = tuple(names.split(","))
    for name in chosen:
        if name not in get_args(PolicyName):
            raise argparse.ArgumentTypeError(f"no policy {name!r}; there are {', '.join(get_args(PolicyName))}")
    return cast(tuple[PolicyName, ...], chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=_policies, default=POLICIES, metavar="NAME,NAME")
    parser.add_argument("--share", type=float, default=0.33, help="of the demand that the caches hold")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the runs there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        runs = options.keep or Path(name)
        print(json.dumps(measure(options.policies, options.share, options.steps, options.seed, runs)))


if __name__ == "__main__":
    main()
