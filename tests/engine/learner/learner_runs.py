"""Runs of the learner without other processes: functions that write their files, read results and clean up."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.task_inputs import write_task_descriptions
from asterism.engine.learner.distributed import gather_full_parameters
from asterism.engine.learner.learner_rank import LearnerRank, TrainStepResult
from asterism.engine.model.hf_checkpoint import load_model
from asterism.tasks import MATH_PYTHON
from tests.engine.learner.training_examples import rows, small_run, store_batch, write_initial_checkpoint

OpenRank = Callable[[RunConfig, RunFolder], LearnerRank]


def make_run(
    path: Path, *, sft_steps: int = 3, ranks: int = 1, every: int = 2, **learner: Any
) -> tuple[RunConfig, RunFolder]:
    """Write the files of a run. `learner`: settings of [learner]."""
    folder = RunFolder(path / "run")
    folder.data.mkdir(parents=True)
    folder.sockets.mkdir()
    write_initial_checkpoint(folder.checkpoints / "init")
    dialogue = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<reason>One and one.</reason>\n<answer>2</answer>"},
    ]
    lines = [json.dumps({"system": "Add.", "messages": dialogue}) + "\n"] * 12  # the run's system text is long
    (folder.data / "sft.jsonl").write_text("".join(lines))
    base = small_run(ranks=ranks, every=every, **learner)
    run = msgspec.structs.replace(base, sft=msgspec.structs.replace(base.sft, steps=sft_steps))
    write_resolved(run, folder.config)
    write_task_descriptions(folder, {"": MATH_PYTHON})
    return run, folder


def sweep_runs(parent: Path) -> None:
    """Clean up the runs that `make_run` has made in `parent` or its folders, as the launcher does."""
    for folder in (*parent.glob("run"), *parent.glob("*/run")):
        for scratch in (RunFolder(folder).sockets, RunFolder(folder).shared_memory):
            shutil.rmtree(scratch, ignore_errors=True)


def no_report(step: int, values: dict[str, float]) -> None:
    pass


def train_step(rank: LearnerRank, folder: RunFolder, step: int, **options: bool) -> TrainStepResult:
    """Train on the rows of this step. `options`: the options of LearnerRank.train."""
    return rank.train(step, store_batch(folder.batches, step, rows(step)), **options)


def saved_weights(folder: RunFolder, step: int) -> dict[str, Tensor]:
    return gather_full_parameters(load_model(folder.get_checkpoint_path(step)))
