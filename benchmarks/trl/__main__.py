"""Compare a run with TRL's GRPOTrainer on the tiny task, or with a real model. Prints a JSON line last.

    make bench-trl [MODEL=FOLDER]                      # creates .venv-trl once
    python -m benchmarks.trl [--rounds 2] [--steps 20] [--threads 2] [--checkpoint STEP_FOLDER] [--quick]
    python -m benchmarks.trl --model FOLDER [--config FILE] [--micro-batch-rows 8]

Three kinds of training alternate by round, so that other load on the machine affects all of them:

    (no prefix)  a run that trains on all rollouts, as TRL does: plain GRPO, groups with equal rewards included
    roc_         a run as in the demo: RoC trains on at most half of the rollouts, and on no group with equal rewards
    trl_         TRL, which trains on all rollouts

All start from the same checkpoint, on the same questions, with a Python tool and the same numbers of prompts, rollouts
and updates (in the demo 16, 16 and 2 per step), the same learning rate, clipping and number of threads. TRL runs the model's code in its own process, without
isolation; the runs execute it in the sandbox.

    step_s            median seconds of a step, without the first step and the last one, which saves a checkpoint
    rows, tokens      rollouts that a step trains on, and their tokens in the loss; means of the measured steps
    reward_s          seconds of the steps up to the first one with a mean reward of REWARD, median of the rounds; null
                      if a round does not reach it
    reward            mean reward of the last five steps
    curve             for each step the seconds since the first step began, and the reward; means of the rounds
    ratio, roc_ratio  trl_step_s / step_s, and trl_step_s / roc_step_s

Without --checkpoint the benchmark starts with a cold start: that of the demo, or with --model that of the word problems.
TRL computes the logits of a whole micro batch at once; with --model it accumulates gradients over micro batches of at most
8 rollouts, because those of a whole update need more memory than most machines have.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from typing import Any

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
WORD_PROBLEMS = Path("examples/word_problems/word_problems.toml")
QUICK_MODEL = ("rl.prompts=2", "rl.rollouts=4", "dialogue.response_tokens=96", "prepare.parameters.num_sft_dialogues=8")
EVERY_ROLLOUT = ("roc.enabled=false", "rl.group_filter=benchmarks.trl.trl_run:accept_any_rewards")

Steps = Sequence[Mapping[str, float]]


def build_runs(options: Options) -> dict[str, RunConfig]:
    """Build the runs by kind, from the checkpoint of a cold start. TRL has a constant learning rate."""
    runs, config, settings = options.scratch, options.config or CONFIG.default, list_settings(options)
    sft = [f"sft.steps={40 if options.quick else 300}", *settings]
    if options.model is not None:
        config = options.config or WORD_PROBLEMS
        settings = [f"model.checkpoint={options.model.resolve()}", *settings]
        settings += [*(QUICK_MODEL if options.quick else ()), *options.set]
        sft = [*(("sft.steps=2", "sft.batch_size=2") if options.quick else ()), *settings]
    checkpoint = options.checkpoint or run_cold_start(config, sft, runs)
    threads = [f"{part}.threads={options.threads}" for part in ("engine", "learner")]
    fixed = ["learner.optimizer.final_lr_fraction=1.0", *threads]
    built: dict[str, RunConfig] = {}
    for kind, selection in (("", EVERY_ROLLOUT), ("roc_", ("roc.enabled=true",))):
        run = from_checkpoint(config, [*settings, *fixed, *selection], checkpoint, options.steps)
        built[kind] = replace(run, runs_folder=str(runs), name=f"{kind}run")
    return built


def find_seconds_to_reward(steps: Steps) -> float | None:
    """Sum the seconds of the steps up to and including the first step with a mean reward of REWARD."""
    reached = next((number for number, step in enumerate(steps, 1) if step["reward"] >= REWARD), None)
    return None if reached is None else sum(step["step_s"] for step in steps[:reached])


def compute_curve(rounds: Sequence[Steps]) -> list[tuple[float, float]]:
    """Return the seconds since the start and the reward of each step, as means of the rounds."""
    seconds = [accumulate(step["step_s"] for step in steps) for steps in rounds]
    rewards = [[step["reward"] for step in steps] for steps in rounds]
    by_step = zip(zip(*seconds, strict=True), zip(*rewards, strict=True), strict=True)
    return [(round(mean(ends), 2), round(mean(found), 4)) for ends, found in by_step]


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


def measure(options: Options) -> dict[str, Any]:
    """Measure all kinds. Raises FlagError, TrlFailed and the errors of benchmarks.support.tiny_run.launch."""
    if not has_trl(options.python):
        raise FlagError(f"--python: {options.python} does not exist or has no TRL; `make trl-environment` installs it")
    configs = build_runs(options)
    settings = build_settings(configs[""], options.threads, options.micro_batch_rows or (8 if options.model else 0))
    rounds: dict[str, list[Steps]] = {kind: [] for kind in (*configs, "trl_")}
    for number in range(1, options.rounds + 1):
        for kind, done in rounds.items():
            done.append(run_over_processes(configs[kind]) if kind in configs else run_trl(options.python, settings))
            print(f"round {number}: {kind:4} {compute_figures(done[-1:])}", file=sys.stderr)
    return combine_figures({kind: compute_figures(done) for kind, done in rounds.items()}) | {
        "rollouts": settings.prompts * settings.rollouts,
        **{f"{kind}curve": compute_curve(done) for kind, done in rounds.items()},
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
        *(CONFIG._replace(default=None, kind=Path), CHECKPOINT, SEED, SETTINGS),
        Flag("--model", kind=Path, text="folder of a model that starts the cold start", metavar="FOLDER"),
        Flag("--micro-batch-rows", kind=int, text="most rollouts of TRL's micro batches", metavar="N"),
        Flag("--python", Path(".venv-trl/bin/python"), "interpreter with TRL"),
        Flag("--rounds", 2, "rounds of each kind", quick=1, least=1),
        Flag("--steps", 20, "steps of each round", quick=4, least=MIN_STEPS),
        Flag("--threads", 2, "threads of TRL, of the engine and of the learner"),
        quick="32 rollouts per step, 4 steps, a short cold start",
        expected=(TrlFailed,),
    )
