"""Names and folders of a run's checkpoints. A folder with a final name is complete and on the disk.

step_000010/
    config.json, tokenizer files
    model.safetensors           the export (asterism.engine.export.hf_export): one file, or shards with an index; not in each checkpoint
    adapter/                    the export of a run with learner.lora_rank has its adapters in the format of peft, too
    trainer/
        state.json              stage, step (which is the data position too), ranks, seed, prompts of the probe
        tensors/                torch.distributed.checkpoint: weights, optimizer, random states of each rank
    asterism-manifest.json      the digest of each file (asterism.configs.integrity.file_manifest), written last
step_000010.damaged/            set aside by a resume: a file differs from the manifest
"""

import re
import shutil
from collections.abc import Collection, Generator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec

from asterism.configs.atomic_write import DISK_ERRNOS, DiskError, raising_disk_errors, sync_paths, sync_tree
from asterism.configs.integrity.file_manifest import DamagedFile, check_file, find_damage, read_manifest

CHECKPOINT_NAME = re.compile(r"step_(\d{6,})")
FIRST_CHECKPOINT = "step_000000"  # the weights before RL, which LoRA freezes
_OS_ERROR = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
DAMAGED_SUFFIX = ".damaged"  # of a folder that a resume has set aside
PARTIAL_SUFFIX = ".building"  # suffix of the hidden name of an incomplete folder
_REPLACED_SUFFIX = f".replaced{PARTIAL_SUFFIX}"


class ProbePrompts(msgspec.Struct, frozen=True):
    """Prompts by which an engine is compared with the learner (asterism.engine.learner.weight_probe)."""

    chosen_at: int  # the step of the batch that contains them
    prompts: tuple[bytes, ...]  # token ids


class TrainerState(msgspec.Struct, frozen=True):
    stage: Literal["sft", "rl"]
    step: int  # finished steps of the stage
    ranks: int
    seed: int
    probe: ProbePrompts | None = None  # so that a restarted learner repeats the probes; None before the first RL step


def get_trainer_folder(checkpoint: Path) -> Path:
    return checkpoint / "trainer"


def get_tensors_folder(checkpoint: Path) -> Path:
    return get_trainer_folder(checkpoint) / "tensors"


def write_trainer_state(checkpoint: Path, state: TrainerState) -> None:
    (get_trainer_folder(checkpoint) / "state.json").write_bytes(msgspec.json.encode(state))


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """Raises OSError if the checkpoint has no trainer state, and DamagedFile."""
    path = get_trainer_folder(checkpoint) / "state.json"
    check_file(path)
    return msgspec.json.decode(path.read_bytes(), type=TrainerState)


def is_resumable(checkpoint: Path) -> bool:
    return (get_trainer_folder(checkpoint) / "state.json").exists()


def find_training_damage(checkpoint: Path) -> str | None:
    """Describe the first damaged file that training needs, all except the exported weights; None without damage.

    Reads these files. A checkpoint without a manifest, of an older version, is not checked.
    """
    try:
        manifest = read_manifest(checkpoint)
        names = manifest.files if manifest else ()
        return find_damage(checkpoint, {name for name in names if not name.endswith(".safetensors")})
    except DamagedFile as error:
        return str(error)


def list_without_state(checkpoints: Path) -> list[tuple[int, Path]]:
    """Steps and folders of checkpoints that have lost their state.json, which their manifest lists."""
    names = ((CHECKPOINT_NAME.fullmatch(path.name), path) for path in sorted(checkpoints.glob("step_*")))
    found = [(int(name[1]), path) for name, path in names if name and not is_resumable(path)]
    return [(step, path) for step, path in found if find_training_damage(path) is not None]


def set_aside(checkpoint: Path) -> Path:
    """Give a damaged checkpoint a name that no reader uses. Returns the new path. Raises OSError."""
    names = (f"{checkpoint.name}{DAMAGED_SUFFIX}{'' if number == 1 else f'-{number}'}" for number in count(1))
    aside = next(path for name in names if not (path := checkpoint.with_name(name)).exists())
    checkpoint.rename(aside)
    sync_paths([checkpoint.parent])
    return aside


def list_set_aside(checkpoints: Path) -> list[Path]:
    return sorted(checkpoints.glob(f"step_*{DAMAGED_SUFFIX}*"))


def get_partial_path(checkpoint: Path) -> Path:
    """Where a checkpoint is written before it gets its final name."""
    return checkpoint.with_name(f".{checkpoint.name}{PARTIAL_SUFFIX}")


@contextmanager
def naming_disk_errors(folder: Path) -> Generator[None]:
    """Raises DiskError if the disk refuses a file of a checkpoint, also for the error types of safetensors and torch."""
    try:
        with raising_disk_errors(folder):
            yield
    except DiskError:
        raise
    except BaseException as error:  # torch's CheckpointException is not an Exception
        errno_matches = _OS_ERROR.findall(str(error))
        number = int("".join(errno_matches[-1])) if errno_matches else 0
        if number not in DISK_ERRNOS:
            raise
        raise DiskError(folder, number) from error


def commit_checkpoint(checkpoint: Path) -> None:
    """Give the finished folder its final name after its files are on the disk.

    A checkpoint of an earlier attempt at the step is replaced. If the process is killed between the two renames,
    `restore_replaced_checkpoints` restores the earlier one.
    """
    partial, replaced = get_partial_path(checkpoint), _get_replaced_path(checkpoint)
    sync_tree(partial)
    if checkpoint.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        checkpoint.rename(replaced)
    partial.rename(checkpoint)
    sync_paths([checkpoint.parent])
    shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced_checkpoints(checkpoints: Path) -> None:
    """Undo replacements that a kill has interrupted. Call this before the checkpoints are read."""
    for replaced in checkpoints.glob(f".*{_REPLACED_SUFFIX}"):
        checkpoint = checkpoints / replaced.name.removeprefix(".").removesuffix(_REPLACED_SUFFIX)
        if not checkpoint.exists():
            replaced.rename(checkpoint)


def _get_replaced_path(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}{_REPLACED_SUFFIX}")


def delete_checkpoint(checkpoint: Path) -> None:
    """Under a hidden name: a kill must not leave a part of a checkpoint under a final name."""
    deleted = checkpoint.with_name(f".{checkpoint.name}.deleted{PARTIAL_SUFFIX}")
    shutil.rmtree(deleted, ignore_errors=True)
    checkpoint.rename(deleted)
    shutil.rmtree(deleted)


def list_saved_steps(checkpoints: Path) -> list[int]:
    """Steps that training can resume from, in ascending order."""
    names = (CHECKPOINT_NAME.fullmatch(path.name) for path in checkpoints.glob("step_*") if is_resumable(path))
    return sorted(int(name[1]) for name in names if name)


def prune_checkpoints(checkpoints: Path, keep: int, protected: Collection[int] = ()) -> list[Path]:
    """Delete all but step 0, the `protected` steps and the newest `keep`, and leftovers of killed saves; returns the
    deleted checkpoints."""
    names = ((CHECKPOINT_NAME.fullmatch(path.name), path) for path in checkpoints.iterdir())
    newest_last = sorted((int(name[1]), path) for name, path in names if name)
    stale = [
        path for step, path in newest_last[: max(0, len(newest_last) - max(1, keep))] if step not in (0, *protected)
    ]
    for checkpoint in stale:
        delete_checkpoint(checkpoint)
    for leftover in checkpoints.glob(f".*{PARTIAL_SUFFIX}"):
        shutil.rmtree(leftover)
    return stale


def delete_checkpoints_after(checkpoints: Path, step: int) -> None:
    """Delete the checkpoints of later steps: the run resumes from `step`, and will write them again."""
    for later in list_saved_steps(checkpoints):
        if later > step:
            delete_checkpoint(checkpoints / f"step_{later:06d}")
