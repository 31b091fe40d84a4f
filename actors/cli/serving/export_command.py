"""`asterism export` writes the model of a run's step as a transformers folder, with chat template and model card."""

import math
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from rich.console import Console
from rich.markup import escape

from asterism.actors.cli.serving.model_card import write_model_card
from asterism.actors.engines.checkpoint_argument import RunStep, find_run_step
from asterism.configs.atomic_write import locking_folder, replacing_folder
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import list_files, write_manifest
from asterism.configs.load import load_run
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import TaskConfig
from asterism.engine.data.task_inputs import read_task_descriptions
from asterism.engine.export.chat_files import ServedChat, build_served_chat, write_chat_files
from asterism.engine.export.hf_export import make_readable, write_model_description
from asterism.engine.learner.checkpoints.checkpoint_weights import open_checkpoint_weights, write_weights
from asterism.engine.model.lora_options import get_lora_options

ExportDtype = Literal["bfloat16", "float16", "float32"]


class ExportOptions(NamedTuple):
    dtype: str = "bfloat16"
    max_shard_gb: float = 5.0  # limit of a weight file's size, in units of 10^9 bytes
    task: str = ""  # name in [[tasks]]; empty: the first task
    overwrite: bool = False


def export_run(reference: str, folder: Path, options: ExportOptions, console: Console) -> None:
    """Export the step. Raises UnusableInput: unknown run, step or task, unusable checkpoint, or folder with files."""
    chosen = find_run_step(reference)
    _check_options(options)
    check_target(folder)
    with locking_folder(folder):
        check_content(folder, overwrite=options.overwrite)
        export_step(chosen, folder, options)
    console.print(f"{escape(str(folder))}: step {chosen.step} of {escape(str(chosen.run.path))}", soft_wrap=True)
    console.print(f"serve it: asterism serve {escape(str(folder))}", soft_wrap=True)


def export_step(chosen: RunStep, folder: Path, options: ExportOptions) -> None:
    """Replace `folder` when the new one is complete. Raises UnusableInput and OSError."""
    run = load_run(chosen.run.config)
    chat = _build_chat(run, chosen, options.task)
    weights = open_checkpoint_weights(chosen.checkpoint, get_lora_options(run.learner))
    dtype = check_dtype(options.dtype)
    with replacing_folder(folder) as partial:
        write_model_description(partial, weights.config, chosen.checkpoint, dtype)
        write_chat_files(partial, chat)
        write_weights(partial, weights, dtype, int(options.max_shard_gb * 10**9))
        write_model_card(partial, run, chosen, chat.facts, options.dtype)
        write_manifest(partial, list_files(partial))
        make_readable(partial, partial.iterdir())


def _check_options(options: ExportOptions) -> None:
    if not math.isfinite(options.max_shard_gb * 10**9):
        raise UnusableInput(f"--max-shard-gb {options.max_shard_gb}: expected a finite number")


def check_dtype(name: str) -> torch.dtype:
    """Return the dtype of weights. Raises UnusableInput."""
    if name not in get_args(ExportDtype):
        raise UnusableInput(f"--dtype {name}: expected {', '.join(get_args(ExportDtype))}")
    return getattr(torch, name)


def check_target(folder: Path) -> None:
    """Raise UnusableInput if the path cannot be a new folder."""
    if folder.exists() and not folder.is_dir():
        raise UnusableInput(f"{folder}: is a file; name a folder")
    if folder.resolve().is_mount():
        raise UnusableInput(f"{folder}: is a mount point; name a folder in it")


def check_content(folder: Path, *, overwrite: bool) -> None:
    """Raise UnusableInput if a new folder would replace other files than those of a model."""
    content = list(folder.iterdir()) if folder.is_dir() else []
    if any(path.is_dir() for path in content):
        raise UnusableInput(f"{folder}: contains folders, so it is not an export; choose another folder")
    if content and not overwrite:
        raise UnusableInput(f"{folder}: is not empty; choose another folder, or replace it with --overwrite")


def _build_chat(run: RunConfig, chosen: RunStep, task_name: str) -> ServedChat:
    task = _choose_task(run, task_name)
    description = read_task_descriptions(chosen.run)[task.name]
    return build_served_chat(run, task, description, chosen.checkpoint)


def _choose_task(run: RunConfig, name: str) -> TaskConfig:
    tasks = run.resolved_tasks
    chosen = next((task for task in tasks if name in ("", task.name)), None)
    if chosen is None:
        raise UnusableInput(f"--task {name}: there is no such task; the run has {', '.join(t.name for t in tasks)}")
    return chosen
