"""Starts runs for benchmarks from a checkpoint: in several processes, in one process, or in a plain loop."""

import json
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvloop
from msgspec.structs import replace
from rich.console import Console

from asterism.actors.launch.checks.input_checks import check_inputs
from asterism.actors.launch.claim_run_folder import claimed_run_folder, increment_counter, keep_task_descriptions
from asterism.actors.launch.display import make_display
from asterism.actors.launch.launcher import Launcher, LogWriteFailure
from asterism.bus.addresses import LAUNCHER
from asterism.bus.process.structured_log import configure_logging
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import EvaluationConfig
from asterism.configs.schema.run_config import ModelConfig, RunConfig
from asterism.configs.schema.schema_tree import replace_keys
from asterism.policies.tools.task_description import TaskDescription
from benchmarks.support.benchmark_main import Flag, Options

CONFIG = Flag("--config", Path("configs/tiny.toml"))
CHECKPOINT = Flag("--checkpoint", kind=Path, text="step_000000 of a run; its folder must still have the data")
SETTINGS = Flag("--set", [], "setting for all runs; may be repeated", metavar="KEY=VALUE")
_QUICK_SETTINGS = ("rl.prompts=4", "rl.rollouts=8", "sft.batch_size=32", "prepare.parameters.num_train_questions=256")


class RunUnfinished(Exception):
    """The run ended before its last step. `str(error)` has the reason."""


def list_settings(options: Options) -> list[str]:
    """List the settings of all runs. The settings of --set follow, and so override, those of --seed and --quick."""
    return [f"seed={options.seed}", *(_QUICK_SETTINGS if options.quick else ()), *options.set]


def run_cold_start(config: Path, settings: Sequence[str], runs: Path) -> Path:
    """Run the cold start of `config` in a new folder below `runs`; return its checkpoint.

    Raises ProcessDied.
    """
    run = load_run(config, [*settings, "rl.steps=0", "evaluation.questions=0", "name=cold"])
    launch(replace(run, runs_folder=str(runs)))
    return RunFolder(runs / "cold").get_checkpoint_path(0)


def from_checkpoint(config: Path, settings: Sequence[str], checkpoint: Path, steps: int) -> RunConfig:
    """Return `config` without cold start and evaluation, on the questions of the checkpoint's run.

    Do not measure the last step, because it saves a checkpoint.
    """
    folder = RunFolder(checkpoint.parents[1].resolve())
    run = load_run(config, [*settings, "sft.steps=0", f"rl.steps={steps}"])

    def locate(path: str) -> str:
        return path.replace("$RUN", str(folder.path))

    return replace(
        run,
        prepare=None,  # the checkpoint's run has prepared the files
        model=ModelConfig(checkpoint=str(checkpoint.resolve())),
        data=replace(run.data, train=locate(run.data.train), test=locate(run.data.test)),
        tasks=tuple(replace(task, data=locate(task.data), test=locate(task.test)) for task in run.tasks),
        evaluation=EvaluationConfig(questions=0),
        learner=replace_keys(run.learner, {"checkpoints.every": steps}),
    )


@contextmanager
def _prepared_run_folder(run: RunConfig) -> Generator[RunFolder, None, None]:
    descriptions: dict[str, TaskDescription] = {}
    check_inputs(run, descriptions)
    with claimed_run_folder(run, resume=False, overwrite=True) as folder:
        keep_task_descriptions(folder, descriptions)
        yield folder


def launch(run: RunConfig) -> RunFolder:
    """Run all processes until the run ends. Raises UnusableInput, RunUnfinished and ProcessDied (launcher.py)."""
    with _prepared_run_folder(run) as folder:
        configure_logging(folder, LAUNCHER, run.log.level)
        display = make_display(Console(stderr=True))
        try:
            ending = uvloop.run(
                Launcher(run, folder, display, increment_counter(folder.launch_counter), LogWriteFailure()).launch()
            )
        finally:
            display.close()
    if ending != "finished":
        raise RunUnfinished(f"the run was {ending}")
    return folder


def run_over_processes(run: RunConfig) -> list[dict[str, float]]:
    """Run over processes. Return the metrics of each step, as the run records them."""
    return _read_steps(launch(run))


def run_in_process(run: RunConfig) -> list[dict[str, float]]:
    """Run in one process (benchmarks.support.in_process_run). Return the metrics of each step."""
    with _prepared_run_folder(run) as folder:
        _run_in_new_process("benchmarks.support.in_process_run", folder)
        return _read_steps(folder)


def run_in_plain_loop(folder: RunFolder) -> list[dict[str, float]]:
    """Run in a plain loop (benchmarks.support.single_loop_run). Return the metrics of each step."""
    return json.loads(_run_in_new_process("benchmarks.support.single_loop_run", folder).splitlines()[-1])


def _read_steps(folder: RunFolder) -> list[dict[str, float]]:
    return [line for line in map(json.loads, folder.metrics.read_text().splitlines()) if line["kind"] == "step"]


def _run_in_new_process(module: str, folder: RunFolder) -> str:
    """Run `module` with the run in `folder`. Return its output.

    The new process has threads that sleep while they wait, as in a run. Two spinning threads train
    far more slowly when another process needs a core.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder.path)],
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout
