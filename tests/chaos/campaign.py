"""`python -m tests.chaos.campaign [--runs 40] [--seed 0] [--resumptions]`: runs of the tiny recipe, hit as their seeds say.

With --resumptions all of each run is killed once, at a random moment, and the run is resumed.

Prints a line for each run, and of one that fails its seed, its history and what does not hold; its folder stays. The last
line is JSON. Exits with 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.checks import complaints, failures_of
from tests.chaos.plans import plan, resumption
from tests.chaos.play import play, undisturbed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next ones count on")
    parser.add_argument("--resumptions", action="store_true", help="kill all of each run once, and resume it")
    options = parser.parse_args()
    planned = resumption if options.resumptions else plan
    runs = Path(tempfile.mkdtemp(prefix="asterism-chaos-"))
    calm = undisturbed(runs)
    failed: list[int] = []
    num_faults, num_same, began = 0, 0, time.monotonic()
    for seed in range(options.seed, options.seed + options.runs):
        started = time.monotonic()
        played = play(calm.cold_start, runs / str(seed), planned(seed, calm.num_events))
        wrong = list(complaints(played, calm.folder))
        num_same += not wrong and not failures_of(played)
        num_faults += len(played.history)
        sys.stdout.write(
            f"seed {seed}: {'FAILED' if wrong else 'ok'}, {len(played.history)} faults, {played.launches} launches, "
            f"{time.monotonic() - started:.0f} s\n"
        )
        if wrong:
            failed.append(seed)
            sys.stdout.write("".join(f"    {line}\n" for line in [*played.history, *wrong, str(played.folder.path)]))
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
