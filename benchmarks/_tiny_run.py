"""Runs as benchmarks need them: from a given checkpoint, without evaluation; over processes, in one, or in a plain loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop
from msgspec.structs import replace
from rich.console import Console

from actors.display import display_for
from actors.launcher import Launcher
from actors.refusal import Refusal
from actors.run_setup import claimed, next_boot
from bus.structured_log import configure
from configs.load import load_run
from configs.run_folder import RunFolder
from configs.schema import Data, Evaluation, Model, Run


class NoFigures(Exception):
    """The run did not get as far as it was asked to. `str(error)` says how it ended."""


def cold_start(config: Path, settings: Sequence[str], runs: Path) -> Path:
    """The checkpoint behind the cold start of `config`, in a new run's folder below `runs`. Raises ProcessDied."""
    run = load_run(config, [*settings, "rl.steps=0", "evaluation.questions=0", "name=cold"])
    launch(replace(run, runs_folder=str(runs)))
    return RunFolder(runs / "cold").checkpoint(0)


def from_checkpoint(config: Path, settings: Sequence[str], checkpoint: Path, steps: int) -> Run:
    """`config` without cold start and evaluation, on the questions of the run that the checkpoint belongs to.

    A step that is to be measured must not be the last one, which saves a checkpoint."""
    data = RunFolder(checkpoint.parents[1].resolve()).data
    run = load_run(config, [*settings, "sft.steps=0", f"rl.steps={steps}"])
    return replace(
        run,
        tiny=None,  # all that it would make is there
        model=Model(checkpoint=str(checkpoint.resolve())),
        data=Data(train=str(data / "train.jsonl"), test=str(data / "test.jsonl")),
        evaluation=Evaluation(questions=0),
        learner=replace(run.learner, checkpoint_every=steps),
    )


def launch(run: Run) -> RunFolder:
    """Start the run's processes, and return when they have ended. Raises NoFigures, actors.launcher.ProcessDied."""
    with claimed(run, resume=False, overwrite=True) as folder:
        configure(folder, "launcher", run.log.level)
        display = display_for(Console(stderr=True))
        try:
            ending = uvloop.run(Launcher(run, folder, display, next_boot(folder), Refusal()).launch())
        finally:
            display.close()
    if ending != "finished":
        raise NoFigures(f"the run was {ending}")
    return folder


def steps_over_processes(run: Run) -> list[dict[str, float]]:
    """Every step's metrics, as the run itself records them."""
    return _recorded(launch(run))


def steps_in_process(run: Run) -> list[dict[str, float]]:
    """The same for the run in one process, on the in-process bus (benchmarks._in_process)."""
    with claimed(run, resume=False, overwrite=True) as folder:
        _in_new_process("benchmarks._in_process", folder)
        return _recorded(folder)


def steps_in_plain_loop(folder: RunFolder) -> list[dict[str, float]]:
    """The same for the steps of the run in `folder`, taken by benchmarks._single_process."""
    return json.loads(_in_new_process("benchmarks._single_process", folder).splitlines()[-1])


def _recorded(folder: RunFolder) -> list[dict[str, float]]:
    return [line for line in map(json.loads, folder.metrics.read_text().splitlines()) if line["kind"] == "step"]


def _in_new_process(module: str, folder: RunFolder) -> str:
    """What `module` prints about the run in `folder`.

    It gets a process that has done nothing before, with threads that sleep while they wait, like a run's: with those
    that spin, two of them train far more slowly as soon as anything else wants a core.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder.path)],
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout
