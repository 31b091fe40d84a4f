"""`python -m tests.chaos.campaign [--runs 40] [--seed 0] [--kind mixed]`: runs of the tiny recipe with faults by seed.

Of three mixed runs, one is over hosts, which can be disconnected from each other, and one has two learner ranks, which
can be killed or stopped. With --kind resumptions, each run is killed as a whole at a random moment, and resumed.

Prints a line for each run, and the seed, history and violations of a failed run; its folder is kept. The last line is
JSON. Exits with 1 if a run failed, and with 2 if hosts cannot be made on this machine.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.checks import count_failures, find_violations
from tests.chaos.over_hosts import OverHosts
from tests.chaos.plans import NUM_RANKS, draw_num_hosts, plan, plan_over_hosts, plan_ranks, plan_resumption
from tests.chaos.play import Baseline, OneMachine, PlayResult, play, run_baseline, run_cold_start
from tests.cluster.hosts import find_obstacle

KINDS = ("mixed", "one-machine", "ranks", "hosts", "resumptions")
_MIXED_KINDS = ("one-machine", "ranks", "hosts")  # one kind after another, by seed


def choose_kind(kind: str, seed: int) -> str:
    return _MIXED_KINDS[seed % len(_MIXED_KINDS)] if kind == "mixed" else kind


def play_seed(kind: str, seed: int, baseline: Baseline, runs: Path) -> PlayResult:
    """Play one seed. `kind` must not be "mixed"."""
    if kind == "hosts":
        hosts = draw_num_hosts(seed)
        return play(OverHosts(baseline.cold_start, runs, hosts), plan_over_hosts(seed, baseline.num_events, hosts))
    if kind == "ranks":
        return play(OneMachine(baseline.cold_start, runs, NUM_RANKS), plan_ranks(seed, baseline.num_events))
    make_plan = plan_resumption if kind == "resumptions" else plan
    return play(OneMachine(baseline.cold_start, runs), make_plan(seed, baseline.num_events))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run; later runs count up")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    options = parser.parse_args()
    if options.kind in ("mixed", "hosts") and (problem := find_obstacle()):
        sys.stderr.write(f"runs over hosts, which are network namespaces, cannot be made: {problem}\n")
        return 2
    runs = Path(tempfile.mkdtemp(prefix="asterism-chaos-"))
    cold_start = run_cold_start(runs / "cold")
    baselines: dict[int, Baseline] = {}  # by number of learner ranks
    failed: list[int] = []
    num_faults, num_same, began = 0, 0, time.monotonic()
    for seed in range(options.seed, options.seed + options.runs):
        kind = choose_kind(options.kind, seed)
        ranks = NUM_RANKS if kind == "ranks" else 1
        if ranks not in baselines:
            baselines[ranks] = run_baseline(cold_start, runs, ranks)
        started, baseline = time.monotonic(), baselines[ranks]
        run = play_seed(kind, seed, baseline, runs / str(seed))
        violations = list(find_violations(run, baseline.folder))
        num_same += not violations and not count_failures(run)
        num_faults += len(run.history)
        sys.stdout.write(
            f"seed {seed}: {'FAILED' if violations else 'ok'}, {run.where}, {len(run.history)} faults, {run.launches} launches, "
            f"{time.monotonic() - started:.0f} s\n"
        )
        if violations:
            failed.append(seed)
            sys.stdout.write("".join(f"    {line}\n" for line in [*run.history, *violations, str(run.folder.path)]))
        else:
            shutil.rmtree(runs / str(seed))
        sys.stdout.flush()
    if not failed:
        shutil.rmtree(runs)
    figures = {
        "runs": options.runs,
        "faults": num_faults,
        "failed": failed,
        "same_as_undisturbed": num_same,
        "wall_s": round(time.monotonic() - began),
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
