"""Compare a run with TRL's GRPOTrainer on the tiny task. JSON last.

    make bench-trl                                     # creates .venv-trl once
    python -m benchmarks.trl [--rounds 2] [--steps 20] [--threads 2] [--checkpoint STEP_FOLDER] [--quick]

Both start from the same checkpoint, on the same questions: 16 prompts x 16 rollouts with a Python tool, two updates per
step, the same learning rate, clipping and number of threads. They alternate by round, in the same session, so that
other load on the machine affects both. TRL runs the model's code in its own process, without isolation; the run
executes it in the sandbox. RoC trains on half of the rollouts, as in the demo; `--set roc.enabled=false` trains on all.

    step_s, trl_step_s      median seconds of a step, without the first step and the last one, which saves a checkpoint
    ratio                   trl_step_s / step_s
    reward_s, trl_reward_s  seconds of the steps up to the first one with a mean reward of REWARD, median of the rounds;
                            null if a round does not reach it
    reward, trl_reward      mean reward of the last five steps

Without --checkpoint the benchmark starts with a cold start.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from msgspec.structs import replace

from benchmarks.support.tiny_run import from_checkpoint, run_cold_start, run_over_processes
from benchmarks.support.trl.trl_run import build_settings, run_trl
from configs.schema import RunConfig

REWARD = 0.8
LAST_STEPS = 5
COLD_START_STEPS, QUICK_COLD_START_STEPS = 300, 40
QUICK = ("rl.prompts=4", "rl.rollouts=8", "sft.batch_size=32", "tiny.num_train_questions=256")

Steps = Sequence[dict[str, float]]


def build_run(options: argparse.Namespace, runs: Path) -> RunConfig:
    """The configuration of the run, from the checkpoint of a cold start. TRL has a constant learning rate."""
    settings = [f"seed={options.seed}", *(QUICK if options.quick else ()), *options.set]
    sft_steps = QUICK_COLD_START_STEPS if options.quick else COLD_START_STEPS
    sft = [f"sft.steps={sft_steps}", *settings]
    checkpoint = options.checkpoint or run_cold_start(options.config, sft, runs)
    threads = [f"{part}.threads={options.threads}" for part in ("engine", "learner")]
    fixed = ["learner.final_lr_fraction=1.0", *threads]
    run = from_checkpoint(options.config, [*settings, *fixed], checkpoint, options.steps)
    return replace(run, runs_folder=str(runs), name="asterism")


def find_seconds_to_reward(steps: Steps) -> float | None:
    """Seconds of the steps up to the first one with REWARD."""
    reached = next((number for number, step in enumerate(steps, 1) if step["reward"] >= REWARD), None)
    return None if reached is None else sum(step["step_s"] for step in steps[:reached])


def compute_figures(rounds: Sequence[Steps]) -> dict[str, float | None]:
    seconds = [find_seconds_to_reward(steps) for steps in rounds]
    reached = [each for each in seconds if each is not None]
    return {
        "step_s": median(step["step_s"] for steps in rounds for step in steps[1:-1]),
        "reward_s": median(reached) if len(reached) == len(rounds) else None,
        "reward": mean(step["reward"] for steps in rounds for step in steps[-LAST_STEPS:]),
    }


def measure(options: argparse.Namespace, runs: Path) -> dict[str, float | None]:
    run = build_run(options, runs)
    settings = build_settings(run, options.threads)
    ours, theirs = list[Steps](), list[Steps]()
    for number in range(1, options.rounds + 1):
        ours.append(run_over_processes(run))
        theirs.append(run_trl(options.python, settings))
        for name, rounds in (("asterism", ours), ("TRL", theirs)):
            print(f"round {number}: {name:9} {compute_figures(rounds[-1:])}", file=sys.stderr)
    figures, trl = compute_figures(ours), compute_figures(theirs)
    ratio = (trl["step_s"] or 0.0) / (figures["step_s"] or 1.0)
    named = {**figures, **{f"trl_{name}": value for name, value in trl.items()}, "ratio": ratio}
    rounded = {name: None if value is None else round(value, 4) for name, value in named.items()}
    return {**rounded, "rounds": options.rounds, "steps": options.steps, "threads": options.threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/tiny.toml"))
    parser.add_argument("--python", type=Path, default=Path(".venv-trl/bin/python"), help="interpreter with TRL")
    parser.add_argument("--checkpoint", type=Path, help="step_000000 of a run; its folder must still have the data")
    parser.add_argument("--rounds", type=int, help="of both (2)")
    parser.add_argument("--steps", type=int, help="of each round (20)")
    parser.add_argument("--threads", type=int, default=2, help="of TRL, of the engine and of the learner")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting; may be repeated")
    parser.add_argument("--quick", action="store_true", help="32 rollouts a step, 4 steps, a short cold start")
    options = parser.parse_args()
    for name, usual, quick in (("rounds", 2, 1), ("steps", 20, 4)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    if not options.python.exists():
        parser.error(f"--python: there is no {options.python}; `make trl-environment` creates it")
    with tempfile.TemporaryDirectory() as runs:
        figures = measure(options, Path(runs))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
