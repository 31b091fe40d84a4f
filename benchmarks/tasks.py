"""Measure the host processes of tasks. Prints a JSON line last.

    python -m benchmarks.tasks [--quick]

| Figure                     | Meaning                                                                  |
|----------------------------|--------------------------------------------------------------------------|
| env_steps_per_s            | calls of an async method, 256 instances in one host process; fastest round |
| sync_env_steps_per_s       | the same for a sync method, which runs in a thread                       |
| instances                  | live instances in one host process, each opened and called once          |
| mib_per_1000               | resident memory of the host process per 1,000 of these instances         |
| regrade_per_s              | trajectories of three calls that `regrade` scores again                  |

The environment's method adds to a number, so the rates depend only on the processes and their
messages. Client and host process run at the same time: the rates need two idle cores.

--quick: rates over a shorter time, 1,000 instances and 200 trajectories.
"""

import asyncio
from typing import NamedTuple

import uvloop

from benchmarks.support.benchmark_main import Options, benchmark_main, show_figures
from benchmarks.support.tasks.counters import Counter, SyncCounter
from benchmarks.support.tasks.host_calls import measure_memory, measure_steps
from benchmarks.support.tasks.regrade_rate import measure_regrading

STEPPING_INSTANCES = 256
AT_LEAST = {"env_steps_per_s": 5000.0}


class Sizes(NamedTuple):
    rounds: int
    rate_s: float
    instances: int
    trajectories: int


FULL = Sizes(rounds=3, rate_s=3.0, instances=10_000, trajectories=2000)
QUICK = Sizes(rounds=1, rate_s=0.5, instances=1000, trajectories=200)


def measure(options: Options) -> dict[str, float]:
    """Measure hosts from the event loop of a run, and regrading from the loop of `asterism log regrade`."""
    sizes = QUICK if options.quick else FULL
    rates = [uvloop.run(measure_steps(Counter, STEPPING_INSTANCES, sizes.rate_s)) for _ in range(sizes.rounds)]
    figures = {
        "env_steps_per_s": max(rates),
        "sync_env_steps_per_s": uvloop.run(measure_steps(SyncCounter, STEPPING_INSTANCES, sizes.rate_s)),
        "instances": sizes.instances,
        "mib_per_1000": uvloop.run(measure_memory(sizes.instances)),
        "regrade_per_s": asyncio.run(measure_regrading(sizes.trajectories, options.scratch)),
    }
    show_figures(figures, AT_LEAST)
    return {name: round(value, 4) for name, value in figures.items()}


if __name__ == "__main__":
    benchmark_main(__doc__, measure, quick="a few seconds")
