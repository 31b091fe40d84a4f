"""`python -m tests.simulation.nightly [SEEDS]`: the faults of tests/simulation/test_faults.py over many more seeds.

Ends with exit code 1, and names the seeds, if any of them breaks an invariant.
"""

from __future__ import annotations

import argparse
import sys
import traceback

import structlog

from tests.simulation.test_faults import check_that_each_ends_once, check_the_engines, check_the_replay, simulate


def failure_of(seed: int) -> str:
    """Empty if the seed is as it should be."""
    try:
        world = simulate(seed)
        check_that_each_ends_once(world)
        check_the_replay(world)
        check_the_engines(world)
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=10_000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    failed: list[int] = []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        if failure := failure_of(seed):
            failed.append(seed)
            sys.stdout.write(f"seed {seed}\n{failure}")
    sys.stdout.write(f"{arguments.seeds - len(failed)} of {arguments.seeds} seeds hold; failed: {failed}\n")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
