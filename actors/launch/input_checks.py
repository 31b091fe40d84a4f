"""Checks of a run's inputs by configuration key, before anything is created: for the launcher and `asterism doctor`.

Nothing here imports torch. The learner checks the shapes of the weights, and the head reads large data files in full.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from engine.model.weight_files import count_parameters, read_json_object
from policies.dialogue.chat_format import TURN_END, TURN_START

_MAX_READ_BYTES = 16 << 20  # larger data files are not read in full here: that takes many seconds
_GIB = 2**30
_FLOAT32_BYTES = 4
_TRAINED_COPIES = 3  # in a checkpoint: the weights and two moments of the optimizer
_PUBLISHED_COPIES = 2  # in shared memory: the weights of two versions


def check_inputs(run: RunConfig) -> None:
    """Raises UnusableInput with the key of the first unusable input."""
    for key, check in list_input_checks(run).items():
        try:
            check()
        except UnusableInput as error:
            raise UnusableInput(f"{key}: {error}") from error


def list_input_checks(run: RunConfig) -> Mapping[str, Callable[[], str]]:
    """By key: a check that returns a description or raises UnusableInput. Inputs that [tiny] generates have none."""
    folder = RunFolder(Path(run.runs_folder) / run.name)
    questions = {"data.train": run.data.train, **({"data.test": run.data.test} if run.evaluation.questions else {})}
    checks: dict[str, Callable[[], str]] = {}
    for key, path in questions.items():
        if not _is_generated(run, path):
            checks[key] = partial(_check_questions, folder.expand_path(path), f"set {key} to a file of questions")
    if run.sft.steps and not _is_generated(run, run.sft.data):
        remedy = "set sft.data to a file of dialogues, or sft.steps = 0"
        checks["sft.data"] = partial(_check_file, folder.expand_path(run.sft.data), remedy)
    if not _is_generated(run, run.model.checkpoint):
        checkpoint = folder.expand_path(run.model.checkpoint)
        checks["model.checkpoint"] = partial(_check_checkpoint, checkpoint, run.dialogue.sequence_tokens)
        checks["space"] = partial(_check_space, checkpoint, folder.path, run.learner.keep_checkpoints)
    return checks


def _is_generated(run: RunConfig, path: str) -> bool:
    return run.tiny is not None and path.startswith("$RUN")


# ---------------------------------------------------------------- data


def _check_file(path: Path, remedy: str) -> str:
    if not path.is_file():
        raise UnusableInput(f"{path}: no such file; {remedy}")
    if not os.access(path, os.R_OK):
        raise UnusableInput(f"{path}: permission denied")
    return f"{path}, {path.stat().st_size:,} bytes"


def _check_questions(path: Path, remedy: str) -> str:
    from engine.data.datasets import read_problems  # with polars

    described = _check_file(path, remedy)
    if path.stat().st_size > _MAX_READ_BYTES:
        return f"{described}; its rows are checked as the run starts"
    return f"{path}: {len(list(read_problems(path))):,} questions"


# ---------------------------------------------------------------- model


def _check_checkpoint(folder: Path, sequence_tokens: int) -> str:
    from engine.model.tokenizer import load_tokenizer

    if not folder.is_dir():
        raise UnusableInput(f"{folder}: no such folder; set it to the folder of a model with the Qwen3 architecture")
    config = read_json_object(folder / "config.json")
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and longest < sequence_tokens:
        raise UnusableInput(
            f"{folder / 'config.json'}: max_position_embeddings is {longest}, but a trajectory has up to "
            f"dialogue.prompt_tokens + response_tokens = {sequence_tokens} tokens"
        )
    tokenizer = load_tokenizer(folder)
    for token in (TURN_START, TURN_END):
        tokenizer.get_token_id(token)
    return f"{folder}: {count_parameters(folder):,} parameters"


# ---------------------------------------------------------------- space


def _check_space(checkpoint: Path, run_folder: Path, keep_checkpoints: int) -> str:
    """Weights in shared memory, and checkpoints on disk: those of the cold start, the last step and one being written.

    The checkpoints of a run that resumes take no further space.
    """
    parameter_bytes = count_parameters(checkpoint) * _FLOAT32_BYTES
    saved_bytes = sum(path.stat().st_size for path in run_folder.glob("checkpoints/*/**/*") if path.is_file())
    existing = next(path for path in (run_folder.absolute(), *run_folder.absolute().parents) if path.exists())
    needs = {
        "/dev/shm": (Path("/dev/shm"), _PUBLISHED_COPIES * parameter_bytes, "two versions of the weights"),
        "the disk of the run": (
            existing,
            max(0, (keep_checkpoints + 3) * _TRAINED_COPIES * parameter_bytes - saved_bytes),
            f"checkpoints (learner.keep_checkpoints = {keep_checkpoints})",
        ),
    }
    described: list[str] = []
    for place, (path, needed, purpose) in needs.items():
        free = shutil.disk_usage(path).free
        if free < needed:
            raise UnusableInput(
                f"{place} has {free / _GIB:.1f} GiB free, but {purpose} take {needed / _GIB:.1f} GiB; "
                "free some space, or use a smaller model.checkpoint"
            )
        described.append(f"{place}: {needed / _GIB:.1f} of {free / _GIB:.1f} GiB")
    return "; ".join(described)
