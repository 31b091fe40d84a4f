"""`python -m tests.chaos.campaign [--runs 40] [--seed 0] [--kind mixed]`: runs of the tiny recipe, hit as their seeds say.

Of mixed runs every third one is over hosts, which may be cut off from each other; the others are on this machine alone.
With --kind resumptions all of each run is killed once, at a random moment, and the run is resumed.

Prints a line for each run, and of one that fails its seed, its history and what does not hold; its folder stays. The last
line is JSON. Exits with 1 if a run failed, and with 2 if there can be no hosts here.
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
from tests.chaos.over_hosts import OverHosts
from tests.chaos.plans import num_hosts, plan, plan_over_hosts, resumption
from tests.chaos.play import OneMachine, Played, Undisturbed, play, undisturbed
from tests.cluster.hosts import why_not

KINDS = ("mixed", "one-machine", "hosts", "resumptions")
_EVERY = 3  # of mixed runs one is over hosts


def played(kind: str, seed: int, calm: Undisturbed, runs: Path) -> Played:
    if kind == "hosts" or (kind == "mixed" and seed % _EVERY == _EVERY - 1):
        hosts = num_hosts(seed)
        return play(OverHosts(calm.cold_start, runs, hosts), plan_over_hosts(seed, calm.num_events, hosts))
    planned = resumption if kind == "resumptions" else plan
    return play(OneMachine(calm.cold_start, runs), planned(seed, calm.num_events))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next ones count on")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    options = parser.parse_args()
    if options.kind in ("mixed", "hosts") and (problem := why_not()):
        sys.stderr.write(f"runs over hosts, which are network namespaces, cannot be made: {problem}\n")
        return 2
    runs = Path(tempfile.mkdtemp(prefix="asterism-chaos-"))
    calm = undisturbed(runs)
    failed: list[int] = []
    num_faults, num_same, began = 0, 0, time.monotonic()
    for seed in range(options.seed, options.seed + options.runs):
        started = time.monotonic()
        run = played(options.kind, seed, calm, runs / str(seed))
        wrong = list(complaints(run, calm.folder))
        num_same += not wrong and not failures_of(run)
        num_faults += len(run.history)
        sys.stdout.write(
            f"seed {seed}: {'FAILED' if wrong else 'ok'}, {run.where}, {len(run.history)} faults, {run.launches} launches, "
            f"{time.monotonic() - started:.0f} s\n"
        )
        if wrong:
            failed.append(seed)
            sys.stdout.write("".join(f"    {line}\n" for line in [*run.history, *wrong, str(run.folder.path)]))
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
