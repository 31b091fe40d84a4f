"""What the processes and the event log cost: RL steps of a real run, beside the same steps of a run without event logs, and
in a plain single-process loop without a bus. JSON last.

    python -m benchmarks.step [--checkpoint runs/demo/checkpoints/step_000000] [--steps 10] [--rounds 2] [--quick]

All begin at the same checkpoint with the same seed, so they generate and train on the same trajectories; the printed
token counts say how nearly. They take turns, a round each; of each step the fastest round counts, so that whatever
else the machine does meets both. A first step (caches, first calls) and a last one (it saves a checkpoint) are taken
besides, and not counted. Without --checkpoint there is a cold start first: an untrained model babbles to its limit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from msgspec.structs import replace

from benchmarks._tiny_run import cold_start, from_checkpoint, steps_in_one_process, steps_over_processes
from configs.run_folder import RunFolder

UNCOUNTED = 2  # the first step and the last
QUICK = ("rl.prompts=4", "rl.rollouts=8", "sft.batch_size=32", "tiny.num_train_questions=256")
QUICK_SFT_STEPS, QUICK_STEPS = 40, 2
SHOWN = (
    *("step_s", "rollout_s", "train_s", "weights_s"),
    *("wait_lease_s", "wait_generation_s", "wait_tools_s", "wait_grading_s"),
    *("generated_tokens", "reward"),
)

Steps = list[dict[str, float]]


def best_of(rounds: Sequence[Steps]) -> Steps:
    """Of each counted step the metrics of its fastest round."""
    counted = [steps[1:-1] for steps in rounds]
    return [min(same, key=lambda step: step["step_s"]) for same in zip(*counted, strict=True)]


def means(steps: Steps) -> dict[str, float]:
    return {name: mean(step[name] for step in steps) for name in SHOWN}


def measure(options: argparse.Namespace, runs: Path) -> dict[str, float]:
    settings = [f"seed={options.seed}", *(QUICK if options.quick else ()), *options.set]
    sft = [f"sft.steps={options.sft_steps}", *settings]
    checkpoint = options.checkpoint or cold_start(options.config, sft, runs)
    run = from_checkpoint(options.config, settings, checkpoint, options.steps + UNCOUNTED)
    run = replace(run, runs_folder=str(runs), name="processes")
    unlogged = replace(run, name="unlogged", log=replace(run.log, events=False))
    over_processes: list[Steps] = []
    without_log: list[Steps] = []
    in_one: list[Steps] = []
    for _ in range(options.rounds):
        over_processes.append(steps_over_processes(run))
        without_log.append(steps_over_processes(unlogged))
        in_one.append(steps_in_one_process(RunFolder(runs / run.name)))
    processes, bare, single = (means(best_of(rounds)) for rounds in (over_processes, without_log, in_one))
    show(processes, bare, single)
    return {
        **{f"{name}_processes": round(processes[name], 4) for name in ("step_s", "rollout_s", "train_s")},
        **{f"{name}_single": round(single[name], 4) for name in ("step_s", "rollout_s", "train_s")},
        "step_s_without_log": round(bare["step_s"], 4),
        "log_ratio": round(processes["step_s"] / bare["step_s"], 3),
        "ratio": round(processes["step_s"] / single["step_s"], 3),
        "weights_s_processes": round(processes["weights_s"], 4),
        "steps": options.steps,
        "seed": run.seed,
        "threads_generator": run.engine.threads,
        "threads_learner": run.learner.threads,
    }


def show(processes: dict[str, float], bare: dict[str, float], single: dict[str, float]) -> None:
    """Waits are means over a step's trajectories, the rest means over steps."""
    print(f"{'':18}{'processes':>12}{'without log':>12}{'one process':>12}")
    for name in SHOWN:
        print(f"{name:18}{processes[name]:12.4f}{bare[name]:12.4f}{single[name]:12.4f}")
    extra_s = processes["step_s"] - single["step_s"]
    parts = ", ".join(f"{name[:-2]} {processes[name] - single[name]:+.3f} s" for name in SHOWN[1:4])
    print(
        f"A step takes {processes['step_s']:.3f} s over processes and {single['step_s']:.3f} s in one process: "
        f"{processes['step_s'] / single['step_s']:.2f} times as long, {extra_s:+.3f} s ({parts})."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/tiny.toml"))
    parser.add_argument("--checkpoint", type=Path, help="step_000000 of a run; its folder must have the data still")
    parser.add_argument("--sft-steps", type=int, help="of the cold start, without --checkpoint (120)")
    parser.add_argument("--steps", type=int, help="that count (10)")
    parser.add_argument("--rounds", type=int, help="of all three, by turns (2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all; may be repeated")
    parser.add_argument("--quick", action="store_true", help="32 trajectories a step, 2 steps, a short cold start")
    options = parser.parse_args()
    for name, usual, quick in (("sft_steps", 120, QUICK_SFT_STEPS), ("steps", 10, QUICK_STEPS), ("rounds", 2, 1)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    with tempfile.TemporaryDirectory() as runs:
        figures = measure(options, Path(runs))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
