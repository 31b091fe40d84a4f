"""The names and folders of a run's checkpoints. A folder with a final name is complete and on the disk.

step_000010/
    config.json, tokenizer files
    model.safetensors           the optional export (engine/export/hf_export.py): one file, or shards with an index
    adapter/                    adapters in the format of peft, in exports of a run with learner.lora.rank
    trainer/
        state.json              stage, step (also the position in the data), ranks, seed, prompts of the probe
        tensors/                weights, optimizer and random states of each rank, by torch.distributed.checkpoint
    asterism-manifest.json      the digest of each file (asterism.configs.file_manifest), written last
step_000010.damaged/            a checkpoint that a resume has set aside: a file differs from the manifest
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
from asterism.configs.file_manifest import DamagedFile, check_file, find_damage, read_manifest

CHECKPOINT_NAME = re.compile(r"step_(\d{6,})")
FIRST_CHECKPOINT = "step_000000"  # the weights before RL, which LoRA freezes
_OS_ERROR = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
DAMAGED_SUFFIX = ".damaged"  # suffix of a folder that a resume has set aside
PARTIAL_SUFFIX = ".building"  # suffix of the hidden name of an incomplete folder
_REPLACED_SUFFIX = f".replaced{PARTIAL_SUFFIX}"


class ProbePrompts(msgspec.Struct, frozen=True):
    """Prompts for the comparison of engine and learner (asterism.engine.learner.weight_probe)."""

    chosen_at: int  # step of the batch from which the prompts come
    prompts: tuple[bytes, ...]  # token ids of each prompt


class TrainerState(msgspec.Struct, frozen=True):
    stage: Literal["sft", "rl"]
    step: int  # finished steps of the stage
    ranks: int
    seed: int
    probe: ProbePrompts | None = None  # a restarted learner repeats the probes; None before the first RL step


def get_trainer_folder(checkpoint: Path) -> Path:
    return checkpoint / "trainer"


def get_tensors_folder(checkpoint: Path) -> Path:
    return get_trainer_folder(checkpoint) / "tensors"


def write_trainer_state(checkpoint: Path, state: TrainerState) -> None:
    (get_trainer_folder(checkpoint) / "state.json").write_bytes(msgspec.json.encode(state))


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """Read state.json. Raises OSError if the checkpoint has no trainer state, and DamagedFile."""
    path = get_trainer_folder(checkpoint) / "state.json"
    check_file(path)
    return msgspec.json.decode(path.read_bytes(), type=TrainerState)


def is_resumable(checkpoint: Path) -> bool:
    return (get_trainer_folder(checkpoint) / "state.json").exists()


def find_training_damage(checkpoint: Path) -> str | None:
    """Describe the first damaged file that training needs (all except exported weights), or return None.

    This reads all bytes. A checkpoint of an older version, without a manifest, is not checked.
    """
    try:
        manifest = read_manifest(checkpoint)
        names = manifest.files if manifest else ()
        return find_damage(checkpoint, {name for name in names if not name.endswith(".safetensors")})
    except DamagedFile as error:
        return str(error)


def list_without_state(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return steps and folders of checkpoints without the state.json that their manifest lists."""
    names = ((CHECKPOINT_NAME.fullmatch(path.name), path) for path in sorted(checkpoints.glob("step_*")))
    found = [(int(name[1]), path) for name, path in names if name and not is_resumable(path)]
    return [(step, path) for step, path in found if find_training_damage(path) is not None]


def set_aside(checkpoint: Path) -> Path:
    """Give a damaged checkpoint a name that no reader uses, and return the new path. Raises OSError."""
    names = (f"{checkpoint.name}{DAMAGED_SUFFIX}{'' if number == 1 else f'-{number}'}" for number in count(1))
    aside = next(path for name in names if not (path := checkpoint.with_name(name)).exists())
    checkpoint.rename(aside)
    sync_paths([checkpoint.parent])
    return aside


def list_set_aside(checkpoints: Path) -> list[Path]:
    return sorted(checkpoints.glob(f"step_*{DAMAGED_SUFFIX}*"))


def get_partial_path(checkpoint: Path) -> Path:
    """Return the path of a checkpoint that does not yet have its final name."""
    return checkpoint.with_name(f".{checkpoint.name}{PARTIAL_SUFFIX}")


@contextmanager
def naming_disk_errors(folder: Path) -> Generator[None]:
    """Raise DiskError for errors of the disk, also if safetensors or torch raise them as errors of other types."""
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

    The folder replaces a checkpoint of an earlier attempt at the step. If the process is killed between the two
    renames, `restore_replaced_checkpoints` restores the earlier checkpoint.
    """
    partial, replaced = get_partial_path(checkpoint), checkpoint.with_name(f".{checkpoint.name}{_REPLACED_SUFFIX}")
    sync_tree(partial)
    if checkpoint.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        checkpoint.rename(replaced)
    partial.rename(checkpoint)
    sync_paths([checkpoint.parent])
    shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced_checkpoints(checkpoints: Path) -> None:
    """Undo interrupted replacements of killed processes. Call this before the checkpoints are read."""
    for replaced in checkpoints.glob(f".*{_REPLACED_SUFFIX}"):
        checkpoint = checkpoints / replaced.name.removeprefix(".").removesuffix(_REPLACED_SUFFIX)
        if not checkpoint.exists():
            replaced.rename(checkpoint)


def delete_checkpoint(checkpoint: Path) -> None:
    """Rename a checkpoint, then delete it: a killed process must not leave a part under the final name."""
    deleted = checkpoint.with_name(f".{checkpoint.name}.deleted{PARTIAL_SUFFIX}")
    shutil.rmtree(deleted, ignore_errors=True)
    checkpoint.rename(deleted)
    shutil.rmtree(deleted)


def list_saved_steps(checkpoints: Path) -> list[int]:
    """Return the steps that training can resume from, in ascending order."""
    names = (CHECKPOINT_NAME.fullmatch(path.name) for path in checkpoints.glob("step_*") if is_resumable(path))
    return sorted(int(name[1]) for name in names if name)


def prune_checkpoints(checkpoints: Path, keep: int, protected: Collection[int] = ()) -> list[Path]:
    """Delete leftovers of killed saves and all checkpoints except step 0, `protected` steps and the newest `keep`.
    Return the deleted checkpoints."""
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
    """Delete checkpoints of later steps, because the run resumes from `step` and writes them again."""
    for later in list_saved_steps(checkpoints):
        if later > step:
            delete_checkpoint(checkpoints / f"step_{later:06d}")
