"""Measure the cost of the bus, the processes and the event log: the same RL steps in five ways. Prints JSON last.

    python -m benchmarks.step [--checkpoint runs/demo/checkpoints/step_000000] [--steps 10] [--rounds 2] [--quick]

| Column         | How the steps run                                        | Key of its figures     |
|----------------|----------------------------------------------------------|------------------------|
| zeromq + log   | as in a real run: one process per actor                  | processes              |
| zeromq         | the same without event logs                              | without_log            |
| in process+log | the same actors in one process, on the in-process bus    | in_process             |
| in process     | the same without event logs                              | in_process_without_log |
| plain loop     | a script without actors, bus and log                     | single                 |

benchmarks.support.in_process_run is the single process; benchmarks.support.single_loop_run is the
script.

All ways start from the same checkpoint with the same seed, so they generate and train on the same
trajectories, up to rounding; the table prints the token counts. The ways alternate by round, and the
fastest round of each step counts, so that other load on the machine affects all ways alike. The
first step (cold caches) and the last one (it saves a checkpoint) are not counted. Without
--checkpoint the benchmark starts with a cold start, because every answer of an untrained model
reaches the token limit.

The seconds of a step (`step_s_KEY`) are `rollout_s`, until its batch is collected; `train_s` of the
learner; and the remainder, in which the weights reach the engine. Four ratios compare the ways:

    log_ratio              zeromq with log / without: the cost of the event log in a run
    log_ratio_in_process   the same in process
    zeromq_ratio           zeromq / in process, both with log: below 1 if separate cores save more than messages cost
    ratio                  zeromq with log / plain loop: the total cost
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean

from msgspec.structs import replace

from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from benchmarks.support.benchmark_main import SEED, Flag, Options, alternate, benchmark_main
from benchmarks.support.tiny_run import (
    CHECKPOINT,
    CONFIG,
    SETTINGS,
    from_checkpoint,
    list_settings,
    run_cold_start,
    run_in_plain_loop,
    run_in_process,
    run_over_processes,
)

UNCOUNTED = 2  # the first and the last step
SHOWN = (
    *("step_s", "rollout_s", "train_s", "weights_s"),
    *("wait_lease_s", "wait_generation_s", "wait_tools_s", "wait_grading_s"),
    *("generated_tokens", "reward"),
)
COLUMNS = {
    "processes": "zeromq + log",
    "without_log": "zeromq",
    "in_process": "in process+log",
    "in_process_without_log": "in process",
    "single": "plain loop",
}

Steps = list[dict[str, float]]
Figures = Mapping[str, Mapping[str, float]]  # means of the steps, by way


def build_ways(run: RunConfig, runs: Path) -> dict[str, Callable[[], Steps]]:
    """Return the functions that run the steps, by the keys of COLUMNS and in their order."""
    logged = replace(run, runs_folder=str(runs), name="processes")
    bare = replace(logged, name="without_log", log=replace(run.log, events=False))
    return {
        "processes": lambda: run_over_processes(logged),
        "without_log": lambda: run_over_processes(bare),
        "in_process": lambda: run_in_process(replace(logged, name="in_process")),
        "in_process_without_log": lambda: run_in_process(replace(bare, name="in_process_without_log")),
        "single": lambda: run_in_plain_loop(RunFolder(runs / logged.name)),
    }


def select_fastest(rounds: Sequence[Steps]) -> Steps:
    """Return the metrics of the fastest round of each counted step."""
    counted = [steps[1:-1] for steps in rounds]
    return [min(same, key=lambda step: step["step_s"]) for same in zip(*counted, strict=True)]


def compute_means(steps: Steps) -> dict[str, float]:
    return {name: mean(step[name] for step in steps) for name in SHOWN}


def measure(options: Options) -> dict[str, float]:
    runs, settings = options.scratch, list_settings(options)
    sft = [f"sft.steps={options.sft_steps}", *settings]
    checkpoint = options.checkpoint or run_cold_start(options.config, sft, runs)
    run = from_checkpoint(options.config, settings, checkpoint, options.steps + UNCOUNTED)
    taken = alternate(build_ways(run, runs), options.rounds)
    figures = {way: compute_means(select_fastest(rounds)) for way, rounds in taken.items()}
    show(figures)
    return {
        **{
            f"{name}_{way}": round(figures[way][name], 4)
            for way in COLUMNS
            for name in ("step_s", "rollout_s", "train_s")
        },
        "weights_s_processes": round(figures["processes"]["weights_s"], 4),
        "log_ratio": compute_ratio(figures, "processes", "without_log"),
        "log_ratio_in_process": compute_ratio(figures, "in_process", "in_process_without_log"),
        "zeromq_ratio": compute_ratio(figures, "processes", "in_process"),
        "ratio": compute_ratio(figures, "processes", "single"),
        "steps": options.steps,
        "seed": run.seed,
        "threads_generator": run.engine.threads,
        "threads_learner": run.learner.threads,
    }


def compute_ratio(figures: Figures, way: str, to: str) -> float:
    return round(figures[way]["step_s"] / figures[to]["step_s"], 3)


def show(figures: Figures) -> None:
    """Print the table. Waits are means over a step's trajectories; the other figures are means over steps."""
    print(f"{'':18}" + "".join(f"{column:>16}" for column in COLUMNS.values()))
    for name in SHOWN:
        print(f"{name:18}" + "".join(f"{figures[way][name]:16.4f}" for way in COLUMNS))
    processes, single = figures["processes"], figures["single"]
    extra_s = processes["step_s"] - single["step_s"]
    parts = ", ".join(f"{name[:-2]} {processes[name] - single[name]:+.3f} s" for name in SHOWN[1:4])
    print(
        f"A step takes {processes['step_s']:.3f} s over processes and {single['step_s']:.3f} s in a plain loop: "
        f"{processes['step_s'] / single['step_s']:.2f} times as long, {extra_s:+.3f} s ({parts})."
    )


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        *(CONFIG, CHECKPOINT, SEED, SETTINGS),
        Flag("--sft-steps", 120, "steps of the cold start, without --checkpoint", quick=40),
        Flag("--steps", 10, "counted steps", quick=2),
        Flag("--rounds", 2, "rounds, in each of which the ways alternate", quick=1),
        quick="32 trajectories per step, 2 steps, a short cold start",
    )
