"""`python -m tests.simulation.nightly [SEEDS] [--first N] [--kind faults]`: run many seeds.

`faults` simulates faults of every kind (tests.simulation.campaign), `repeats` simulates engine losses and duplicate
messages (tests.simulation.test_faults), and `tasks` simulates three tasks under faults of every kind
(tests.simulation.test_tasks). A run that breaks an invariant is printed with seed, history and error; exit code 1.
"""

import argparse
import gc
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from typing import NamedTuple

import structlog

from tests.simulation import campaign, test_faults, test_tasks
from tests.simulation.world import World

WORLDS = {"faults": campaign.world_of, "repeats": test_faults.world_of, "tasks": test_tasks.world_of}
_AT_ONCE = 20  # seeds per task of a worker process


def failure_of(world: World) -> str:
    """Play the run. Return the traceback of its failure, or an empty string."""
    try:
        campaign.play(world)
    except Exception:
        return traceback.format_exc()
    return ""


class Played(NamedTuple):
    """The result of one task of a worker process."""

    failures: list[tuple[int, str]]  # seed, and history with the error
    deaths: Counter[str]
    num_events: int


def play(kind: str, first: int, count: int) -> Played:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    gc.disable()  # collect garbage once, after all runs
    played = Played([], Counter(), 0)
    for seed in range(first, first + count):
        world = WORLDS[kind](seed)
        if failure := failure_of(world):
            played.failures.append((seed, "\n".join((*world.history, failure))))
        played.deaths.update(world.deaths)
        played = played._replace(num_events=played.num_events + sum(len(log.events) for log in world.logs.values()))
    gc.collect()
    return played


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", choices=WORLDS, default="faults")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    end = arguments.first + arguments.seeds
    parts = [(first, min(_AT_ONCE, end - first)) for first in range(arguments.first, end, _AT_ONCE)]
    failed: list[int] = []
    deaths: Counter[str] = Counter()
    began, num_events = time.monotonic(), 0
    with ProcessPoolExecutor(arguments.processes, get_context("forkserver")) as processes:
        for played in processes.map(play, repeat(arguments.kind), *zip(*parts, strict=True)):
            for seed, failure in played.failures:
                failed.append(seed)
                sys.stdout.write(f"seed {seed}\n{failure}\n")
            deaths += played.deaths
            num_events += played.num_events
    died = ", ".join(f"{kind} {count}" for kind, count in sorted(deaths.items()))
    sys.stdout.write(f"{num_events} events, deaths: {died}\n")
    held, wall_s = arguments.seeds - len(failed), time.monotonic() - began
    sys.stdout.write(f"{held} of {arguments.seeds} seeds hold, in {wall_s:.1f} s; failed: {failed}\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
