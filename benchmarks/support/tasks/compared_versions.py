"""Measures the RL steps of the demo in this version and in an earlier commit, from the same checkpoint.

As a program, `python -P compared_versions.py ROOT CHECKPOINT RUNS STEPS [KEY=VALUE ...]`, it runs the
steps in the checkout ROOT and prints their seconds as JSON. The current folder and PYTHONPATH must
be ROOT. The program imports only modules that the earlier commit also has.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from asterism import actors
from benchmarks.support import tiny_run

_ROOT = Path(__file__).parents[3]
_CONFIG = Path("configs/tiny.toml")
_UNCOUNTED = 2  # the first step, with cold caches, and the last one, which saves a checkpoint


class CommitMissing(Exception):
    """git or the commit is missing. `str(error)` has the reason."""


class DemoSizes(NamedTuple):
    sft_steps: int
    steps: int  # counted steps of each round
    rounds: int
    settings: tuple[str, ...] = ()


def compare_with_commit(commit: str, sizes: DemoSizes) -> dict[str, float]:
    """Return the median seconds of a step in both versions, and their ratios. Raises CommitMissing."""
    with tempfile.TemporaryDirectory() as folder:
        base, runs = Path(folder) / "base", Path(folder) / "runs"
        _extract_commit(commit, base)
        settings = [f"sft.steps={sizes.sft_steps}", *sizes.settings]
        checkpoint = tiny_run.run_cold_start(_ROOT / _CONFIG, settings, runs)
        this_rounds: list[list[float]] = []
        base_rounds: list[list[float]] = []
        for number in range(sizes.rounds):
            ways = [(_ROOT, this_rounds), (base, base_rounds)]
            for root, rounds in ways[:: -1 if number % 2 else 1]:  # neither version is always the first
                rounds.append(_run_steps(root, checkpoint, runs, sizes))
    this_s, base_s = (median(step for steps in rounds for step in steps) for rounds in (this_rounds, base_rounds))
    return {
        "demo_step_ratio": this_s / base_s,
        "demo_step_ratio_of_fastest": _sum_fastest(this_rounds) / _sum_fastest(base_rounds),
        "demo_step_s": this_s,
        "demo_step_s_base": base_s,
    }


def _sum_fastest(rounds: Sequence[Sequence[float]]) -> float:
    """Sum the fastest round of each step: other load on the machine affects it least."""
    return sum(min(same) for same in zip(*rounds, strict=True))


def _extract_commit(commit: str, folder: Path) -> None:
    try:
        archive = subprocess.run(
            ["git", "-C", str(_ROOT), "archive", commit], capture_output=True, check=True, timeout=60
        )
    except OSError as error:
        raise CommitMissing(f"git: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        raise CommitMissing(f"git archive {commit}: {error.stderr.decode(errors='replace').strip()}") from None
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    # Earlier versions import this package, which is no longer installed.
    writer = (_ROOT / "configs/toml_text.py").read_text()
    (folder / "tomli_w.py").write_text(f"{writer}\n\ndumps = encode_table\n")


def _run_steps(root: Path, checkpoint: Path, runs: Path, sizes: DemoSizes) -> list[float]:
    """Return the seconds of the counted steps. PYTHONPATH precedes an editable install of this version."""
    arguments = [str(root), str(checkpoint), str(runs), str(sizes.steps + _UNCOUNTED), *sizes.settings]
    done = subprocess.run(
        [sys.executable, "-P", __file__, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])[1:-1]


def main() -> None:
    root, checkpoint, runs, steps, *settings = sys.argv[1:]
    for package in (actors, tiny_run):
        if not Path(str(package.__file__)).is_relative_to(Path(root).resolve()):
            sys.exit(f"{package.__name__} is imported from {package.__file__}, not from {root}")
    run = tiny_run.from_checkpoint(_CONFIG, settings, Path(checkpoint), int(steps))
    metrics = tiny_run.run_over_processes(replace(run, runs_folder=runs, name="compared"))
    print(json.dumps([step["step_s"] for step in metrics]))


if __name__ == "__main__":
    main()
