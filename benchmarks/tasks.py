"""Measure the host processes of tasks, and the steps of a run without them. Prints a JSON line last.

    python -m benchmarks.tasks [--base COMMIT] [--quick]

| Figure                     | Meaning                                                                  |
|----------------------------|--------------------------------------------------------------------------|
| env_steps_per_s            | calls of an async method, 256 instances in one host process; fastest round |
| sync_env_steps_per_s       | the same for a sync method, which runs in a thread                       |
| instances                  | live instances in one host process, each opened and called once          |
| mib_per_1000               | resident memory of the host process per 1,000 of these instances         |
| regrade_per_s              | trajectories of three calls that `regrade` scores again                  |
| demo_step_ratio            | median seconds of a step of configs/tiny.toml: this version / COMMIT     |
| demo_step_ratio_of_fastest | the same with the fastest round of each step, if the machine is not idle |

The environment's method adds to a number, so the rates depend only on the processes and their
messages. Client and host process run at the same time: the rates need two idle cores.

COMMIT is by default the last commit without host processes. Both versions start from the same
checkpoint, with the same interpreter, and alternate. Without git or the commit, the figures of the
demo are missing.

--quick: rates over a shorter time, 1,000 instances, 200 trajectories, and small steps of the demo in one round.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import uvloop

from benchmarks.support.tasks.compared_versions import CommitMissing, DemoSizes, compare_with_commit
from benchmarks.support.tasks.counters import Counter, SyncCounter
from benchmarks.support.tasks.host_calls import measure_memory, measure_steps
from benchmarks.support.tasks.regrade_rate import measure_regrading

BASE = "e99b042"  # the last commit without host processes
STEPPING_INSTANCES = 256
AT_LEAST = {"env_steps_per_s": 5000.0}
AT_MOST = {"demo_step_ratio": 1.03}


class Sizes(NamedTuple):
    rounds: int
    rate_s: float
    instances: int
    trajectories: int
    demo: DemoSizes


FULL = Sizes(rounds=3, rate_s=3.0, instances=10_000, trajectories=2000, demo=DemoSizes(120, 8, 3))
QUICK_DEMO = ("rl.prompts=4", "rl.rollouts=8", "sft.batch_size=32", "tiny.num_train_questions=256")
QUICK = Sizes(1, 0.5, 1000, 200, DemoSizes(40, 2, 1, QUICK_DEMO))


def measure_hosts(sizes: Sizes) -> dict[str, float]:
    """Measure hosts from the event loop of a run, and regrading from the loop of `asterism log regrade`."""
    rates = [uvloop.run(measure_steps(Counter, STEPPING_INSTANCES, sizes.rate_s)) for _ in range(sizes.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        regraded = asyncio.run(measure_regrading(sizes.trajectories, Path(folder)))
    return {
        "env_steps_per_s": max(rates),
        "sync_env_steps_per_s": uvloop.run(measure_steps(SyncCounter, STEPPING_INSTANCES, sizes.rate_s)),
        "instances": sizes.instances,
        "mib_per_1000": uvloop.run(measure_memory(sizes.instances)),
        "regrade_per_s": regraded,
    }


def show(figures: dict[str, float]) -> dict[str, float]:
    for name, value in figures.items():
        print(f"  {name:28}{value:12,.3f}{format_judgement(name, value)}", flush=True)
    return figures


def format_judgement(name: str, value: float) -> str:
    if name in AT_LEAST:
        return f"   at least {AT_LEAST[name]:g}{'' if value >= AT_LEAST[name] else ': MISSED'}"
    if name in AT_MOST:
        return f"   at most {AT_MOST[name]:g}{'' if value <= AT_MOST[name] else ': MISSED'}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=BASE, metavar="COMMIT", help=f"commit to compare the demo with ({BASE})")
    parser.add_argument("--quick", action="store_true", help="a few minutes")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    figures = show(measure_hosts(sizes))
    try:
        figures |= show(compare_with_commit(options.base, sizes.demo))
    except CommitMissing as error:
        print(f"benchmarks.tasks: the figures of the demo are missing: {error}", file=sys.stderr)
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
