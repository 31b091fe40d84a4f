"""Checkpoints of a run: an ordinary transformers folder with `trainer/` inside, complete under its name or not there.

step_000010/
    config.json, model.safetensors, tokenizer files
    trainer/
        state.json              stage, step (which is the data position too), ranks, seed
        random_0.pt             random state of each rank
        optimizer/              torch.distributed.checkpoint; absent at the start of a stage
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from configs.disk import REFUSALS, DiskRefused, writing

NAME = re.compile(r"step_(\d{6,})")
_OS_ERROR = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
BUILDING = ".building"  # ends the hidden name of a folder that is not yet complete


class TrainerState(msgspec.Struct, frozen=True):
    stage: Literal["sft", "rl"]
    step: int  # steps of the stage that are done
    ranks: int
    seed: int


def trainer_folder(checkpoint: Path) -> Path:
    return checkpoint / "trainer"


def write_state(checkpoint: Path, state: TrainerState) -> None:
    (trainer_folder(checkpoint) / "state.json").write_bytes(msgspec.json.encode(state))


def read_state(checkpoint: Path) -> TrainerState:
    """Raises OSError if there is none."""
    return msgspec.json.decode((trainer_folder(checkpoint) / "state.json").read_bytes(), type=TrainerState)


def is_resumable(checkpoint: Path) -> bool:
    return (trainer_folder(checkpoint) / "state.json").exists()


def building(checkpoint: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return checkpoint.with_name(f".{checkpoint.name}{BUILDING}")


@contextmanager
def refusals_named(folder: Path) -> Generator[None]:
    """Raises DiskRefused where the disk refuses a file of a checkpoint, also through safetensors and torch, which tell of it
    in errors of their own."""
    try:
        with writing(folder):
            yield
    except DiskRefused:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        told = _OS_ERROR.findall(str(error))
        number = int("".join(told[-1])) if told else 0
        if number not in REFUSALS:
            raise
        raise DiskRefused(folder, number) from error


def complete(checkpoint: Path) -> None:
    """Give the finished folder its name. One of that name from an earlier attempt at the step is replaced."""
    replaced = checkpoint.with_name(f".{checkpoint.name}.replaced{BUILDING}")
    if checkpoint.exists():
        checkpoint.rename(replaced)
    building(checkpoint).rename(checkpoint)
    shutil.rmtree(replaced, ignore_errors=True)


def steps_saved(checkpoints: Path) -> list[int]:
    """Steps that training can go on from, in order."""
    names = (NAME.fullmatch(path.name) for path in checkpoints.glob("step_*") if is_resumable(path))
    return sorted(int(name[1]) for name in names if name)


def prune(checkpoints: Path, keep: int) -> list[Path]:
    """Delete all but step 0 and the newest `keep`; returns what was deleted. Leftovers of a killed save go as well."""
    numbered = [(int(name[1]), path) for path in checkpoints.iterdir() if (name := NAME.fullmatch(path.name))]
    newest_last = sorted(numbered)
    stale = [path for step, path in newest_last[: len(newest_last) - max(1, keep)] if step != 0]
    for path in [*stale, *checkpoints.glob(f".*{BUILDING}")]:
        shutil.rmtree(path)
    return stale


def forget_after(checkpoints: Path, step: int) -> None:
    """Delete those of later steps: the run goes on from `step`, and comes to them again."""
    for later in steps_saved(checkpoints):
        if later > step:
            shutil.rmtree(checkpoints / f"step_{later:06d}")
