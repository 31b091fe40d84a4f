"""`python -P demo_steps.py ROOT CHECKPOINT RUNS STEPS [KEY=VALUE ...]`: RL steps of the demo in the checkout ROOT.

Prints the seconds of all steps as JSON. The current folder and PYTHONPATH must be ROOT. Only what
the compared commit also has may be imported.
"""

import json
import sys
from pathlib import Path

from msgspec.structs import replace

import actors
from benchmarks.support import tiny_run


def main() -> None:
    root, checkpoint, runs, steps, *settings = sys.argv[1:]
    for package in (actors, tiny_run):
        if not Path(str(package.__file__)).is_relative_to(Path(root).resolve()):
            sys.exit(f"{package.__name__} is imported from {package.__file__}, not from {root}")
    run = tiny_run.from_checkpoint(Path("configs/tiny.toml"), settings, Path(checkpoint), int(steps))
    metrics = tiny_run.run_over_processes(replace(run, runs_folder=runs, name="compared"))
    print(json.dumps([step["step_s"] for step in metrics]))


if __name__ == "__main__":
    main()
