import errno
from pathlib import Path

import pytest

from configs.disk import DiskRefused
from engine.snapshots import (
    TrainerState,
    building,
    complete,
    is_resumable,
    prune,
    read_state,
    refusals_named,
    steps_saved,
    trainer_folder,
    write_state,
)


def save(checkpoints: Path, step: int) -> None:
    checkpoint = checkpoints / f"step_{step:06d}"
    trainer_folder(building(checkpoint)).mkdir(parents=True)
    write_state(building(checkpoint), TrainerState("rl", step, ranks=1, seed=0))
    complete(checkpoint)


def test_saved_steps_are_listed_in_order_and_only_once_they_have_their_name(tmp_path: Path) -> None:
    for step in (20, 0, 1_000_000):
        save(tmp_path, step)
    trainer_folder(building(tmp_path / "step_000030")).mkdir(parents=True)
    write_state(building(tmp_path / "step_000030"), TrainerState("rl", 30, ranks=1, seed=0))
    assert steps_saved(tmp_path) == [0, 20, 1_000_000]


def test_the_state_comes_back_as_it_was_written(tmp_path: Path) -> None:
    save(tmp_path, 7)
    assert read_state(tmp_path / "step_000007") == TrainerState("rl", 7, ranks=1, seed=0)


def test_a_step_that_is_saved_again_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / "step_000005" / "old").touch()
    save(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]
    assert not (tmp_path / "step_000005" / "old").exists()


def test_there_are_no_saved_steps_where_there_is_no_folder(tmp_path: Path) -> None:
    assert steps_saved(tmp_path / "checkpoints") == []


def test_pruning_keeps_the_cold_start_and_the_newest_and_sweeps_what_a_kill_left(tmp_path: Path) -> None:
    for step in (0, 10, 20, 30, 40):
        (tmp_path / f"step_{step:06d}").mkdir()
    for other in ("init", "sft_partial", building(tmp_path / "step_000050").name):
        (tmp_path / other).mkdir()
    prune(tmp_path, keep=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["init", "sft_partial", "step_000000", "step_000030", "step_000040"]


def test_a_folder_without_trainer_state_is_no_step_to_go_on_from(tmp_path: Path) -> None:
    (tmp_path / "step_000003").mkdir()
    assert not is_resumable(tmp_path / "step_000003")
    assert steps_saved(tmp_path) == []


class OfTorch(BaseException):
    """As torch's CheckpointException is one."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        OfTorch("Traceback (RANK 0)\nOSError: [Errno 28] No space left on device\n"),
    ],
)
def test_a_disk_that_refuses_a_checkpoint_is_named_with_it(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(DiskRefused) as refused, refusals_named(tmp_path / ".step_000002.building"):
        raise error
    assert str(refused.value) == f"{tmp_path}/.step_000002.building: No space left on device"
    assert refused.value.__cause__ is error


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "no"), RuntimeError("(os error 2)"), OfTorch("x")])
def test_what_is_not_the_disks_stays_what_it_is(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as stays, refusals_named(tmp_path):
        raise error
    assert stays.value is error
