"""Compare a run with TRL's GRPOTrainer on the tiny task. Prints a JSON line last.

    make bench-trl                                     # creates .venv-trl once
    python -m benchmarks.trl [--rounds 2] [--steps 20] [--threads 2] [--checkpoint STEP_FOLDER] [--quick]

Three kinds of training alternate by round, so that other load on the machine affects all of them:

    (no prefix)  a run that trains on all rollouts, as TRL does: plain GRPO, groups with equal rewards included
    roc_         a run as in the demo: RoC trains on at most half of the rollouts, and on no group with equal rewards
    trl_         TRL, which trains on all rollouts

All start from the same checkpoint, on the same questions: 16 prompts x 16 rollouts with a Python tool, two updates per
step, the same learning rate, clipping and number of threads. TRL runs the model's code in its own process, without
isolation; the runs execute it in the sandbox.

    step_s            median seconds of a step, without the first step and the last one, which saves a checkpoint
    rows, tokens      rollouts that a step trains on, and their tokens in the loss; means of the measured steps
    reward_s          seconds of the steps up to the first one with a mean reward of REWARD, median of the rounds; null
                      if a round does not reach it
    reward            mean reward of the last five steps
    ratio, roc_ratio  trl_step_s / step_s, and trl_step_s / roc_step_s

Without --checkpoint the benchmark starts with a cold start.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from msgspec.structs import replace

from asterism.configs.schema.run_config import RunConfig
from benchmarks.support.benchmark_main import SEED, Flag, FlagError, Options, benchmark_main
from benchmarks.support.tiny_run import (
    CHECKPOINT,
    CONFIG,
    SETTINGS,
    from_checkpoint,
    list_settings,
    run_cold_start,
    run_over_processes,
)
from benchmarks.trl.trl_run import TrlFailed, build_settings, has_trl, run_trl

REWARD = 0.8
LAST_STEPS = 5
MIN_STEPS = 3  # the first and the last step are not measured
EVERY_ROLLOUT = ("roc.enabled=false", "rl.group_filter=benchmarks.trl.trl_run:accept_any_rewards")

Steps = Sequence[Mapping[str, float]]


def build_runs(options: Options) -> dict[str, RunConfig]:
    """Build the runs by kind, from the checkpoint of a cold start. TRL has a constant learning rate."""
    runs, settings = options.scratch, list_settings(options)
    sft = [f"sft.steps={40 if options.quick else 300}", *settings]
    checkpoint = options.checkpoint or run_cold_start(options.config, sft, runs)
    threads = [f"{part}.threads={options.threads}" for part in ("engine", "learner")]
    fixed = ["learner.optimizer.final_lr_fraction=1.0", *threads]
    built: dict[str, RunConfig] = {}
    for kind, selection in (("", EVERY_ROLLOUT), ("roc_", ("roc.enabled=true",))):
        run = from_checkpoint(options.config, [*settings, *fixed, *selection], checkpoint, options.steps)
        built[kind] = replace(run, runs_folder=str(runs), name=f"{kind}run")
    return built


def find_seconds_to_reward(steps: Steps) -> float | None:
    """Sum the seconds of the steps up to and including the first step with a mean reward of REWARD."""
    reached = next((number for number, step in enumerate(steps, 1) if step["reward"] >= REWARD), None)
    return None if reached is None else sum(step["step_s"] for step in steps[:reached])


def compute_figures(rounds: Sequence[Steps]) -> dict[str, float | None]:
    """Compute the figures of all rounds. `rows` and `tokens` of a step without an update count as 0."""
    seconds = [find_seconds_to_reward(steps) for steps in rounds]
    reached = [each for each in seconds if each is not None]
    measured = [step for steps in rounds for step in steps[1:-1]]
    return {
        "step_s": median(step["step_s"] for step in measured),
        "rows": mean(step.get("rows", 0.0) for step in measured),
        "tokens": mean(step.get("tokens", 0.0) for step in measured),
        "reward_s": median(reached) if len(reached) == len(rounds) else None,
        "reward": mean(step["reward"] for steps in rounds for step in steps[-LAST_STEPS:]),
    }


def measure(options: Options) -> dict[str, float | None]:
    """Measure all kinds. Raises FlagError, TrlFailed and the errors of benchmarks.support.tiny_run.launch."""
    if not has_trl(options.python):
        raise FlagError(f"--python: {options.python} does not exist or has no TRL; `make trl-environment` installs it")
    configs = build_runs(options)
    settings = build_settings(configs[""], options.threads)
    rounds: dict[str, list[Steps]] = {kind: [] for kind in (*configs, "trl_")}
    for number in range(1, options.rounds + 1):
        for kind, done in rounds.items():
            done.append(run_over_processes(configs[kind]) if kind in configs else run_trl(options.python, settings))
            print(f"round {number}: {kind:4} {compute_figures(done[-1:])}", file=sys.stderr)
    return combine_figures({kind: compute_figures(done) for kind, done in rounds.items()}) | {
        "rollouts": settings.prompts * settings.rollouts,
        **{name: getattr(options, name) for name in ("rounds", "steps", "threads")},
    }


def combine_figures(by_kind: Mapping[str, Mapping[str, float | None]]) -> dict[str, float | None]:
    """Round the figures, prefix them with their kind, and add the ratios."""
    named = {kind + name: value for kind, figures in by_kind.items() for name, value in figures.items()}
    for kind in ("", "roc_"):
        ours, theirs = named[f"{kind}step_s"], named["trl_step_s"]
        named[f"{kind}ratio"] = theirs / ours if ours and theirs else None
    return {name: None if value is None else round(value, 4) for name, value in named.items()}


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        *(CONFIG, CHECKPOINT, SEED, SETTINGS),
        Flag("--python", Path(".venv-trl/bin/python"), "interpreter with TRL"),
        Flag("--rounds", 2, "rounds of each kind", quick=1, least=1),
        Flag("--steps", 20, "steps of each round", quick=4, least=MIN_STEPS),
        Flag("--threads", 2, "threads of TRL, of the engine and of the learner"),
        quick="32 rollouts per step, 4 steps, a short cold start",
        expected=(TrlFailed,),
    )
