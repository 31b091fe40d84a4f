"""`python -m tests.simulation.nightly [SEEDS] [--first N] [--kind faults]`: simulated runs over many more seeds than the tests have.

`faults`: anything happens to anybody (tests.simulation.campaign). `repeats`: engines are lost, and what deciders hear comes
twice (tests.simulation.test_faults). Prints the seed, the history and the complaint of each run that breaks an invariant,
and ends with exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections import Counter

import structlog

from tests.simulation import campaign, test_faults
from tests.simulation.world import World

WORLDS = {"faults": campaign.world_of, "repeats": test_faults.world_of}
_SWEEP_EACH = 20  # runs: what they leave is collected then, and not in the middle of them


def failure_of(world: World) -> str:
    """Empty if all is as it should be."""
    try:
        campaign.play(world)
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", choices=WORLDS, default="faults")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    gc.disable()
    failed: list[int] = []
    deaths: Counter[str] = Counter()
    began, num_events = time.monotonic(), 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        world = WORLDS[arguments.kind](seed)
        if failure := failure_of(world):
            failed.append(seed)
            sys.stdout.write("\n".join((f"seed {seed}", *world.history, failure)))
        deaths += world.deaths
        num_events += sum(len(log.events) for log in world.logs.values())
        if seed % _SWEEP_EACH == 0:
            gc.collect()
    died = ", ".join(f"{kind} {count}" for kind, count in sorted(deaths.items()))
    sys.stdout.write(f"{num_events} events, deaths: {died}\n")
    held, wall_s = arguments.seeds - len(failed), time.monotonic() - began
    sys.stdout.write(f"{held} of {arguments.seeds} seeds hold, in {wall_s:.1f} s; failed: {failed}\n")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
