import errno
from pathlib import Path

import pytest

from asterism.configs.atomic_write import DiskError
from asterism.engine.learner.checkpoints import checkpoint_folders as folders


def save_partially(checkpoints: Path, step: int) -> Path:
    checkpoint = checkpoints / f"step_{step:06d}"
    folders.get_trainer_folder(folders.get_partial_path(checkpoint)).mkdir(parents=True)
    folders.write_trainer_state(folders.get_partial_path(checkpoint), folders.TrainerState("rl", step, ranks=1, seed=0))
    return checkpoint


def save(checkpoints: Path, step: int) -> None:
    folders.commit_checkpoint(save_partially(checkpoints, step))


def test_only_complete_checkpoints_are_listed_in_order(tmp_path: Path) -> None:
    for step in (20, 0, 1_000_000):
        save(tmp_path, step)
    save_partially(tmp_path, 30)
    assert folders.list_saved_steps(tmp_path) == [0, 20, 1_000_000]


def test_the_trainer_state_round_trips(tmp_path: Path) -> None:
    save(tmp_path, 7)
    assert folders.read_trainer_state(tmp_path / "step_000007") == folders.TrainerState("rl", 7, ranks=1, seed=0)


def test_a_step_that_is_saved_again_replaces_the_first_save(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / "step_000005" / "old").touch()
    save(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000005"]
    assert not (tmp_path / "step_000005" / "old").exists()


def test_pruning_keeps_step_0_and_the_newest_step_and_removes_leftovers(tmp_path: Path) -> None:
    for step in (0, 10, 20, 30, 40):
        (tmp_path / f"step_{step:06d}").mkdir()
    for other in ("init", "sft_partial", folders.get_partial_path(tmp_path / "step_000050").name):
        (tmp_path / other).mkdir()
    folders.prune_checkpoints(tmp_path, keep=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["init", "sft_partial", "step_000000", "step_000030", "step_000040"]


def test_all_checkpoints_are_kept_below_the_limit(tmp_path: Path) -> None:
    for step in (0, 1, 2, 3):
        save(tmp_path, step)
    assert folders.prune_checkpoints(tmp_path, keep=5) == []
    assert folders.list_saved_steps(tmp_path) == [0, 1, 2, 3]


def test_a_folder_without_trainer_state_is_not_resumable(tmp_path: Path) -> None:
    (tmp_path / "step_000003").mkdir()
    assert not folders.is_resumable(tmp_path / "step_000003")
    assert folders.list_saved_steps(tmp_path) == folders.list_saved_steps(tmp_path / "missing") == []


class OfTorch(BaseException):
    """A BaseException that is not an Exception, like torch's CheckpointException."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        OfTorch("Traceback (RANK 0)\nOSError: [Errno 28] No space left on device\n"),
    ],
)
def test_disk_errors_name_the_checkpoint(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(DiskError) as refused, folders.naming_disk_errors(tmp_path / ".step_000002.building"):
        raise error
    assert str(refused.value) == f"{tmp_path}/.step_000002.building: No space left on device"
    assert refused.value.__cause__ is error


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "no"), RuntimeError("(os error 2)"), OfTorch("x")])
def test_other_errors_are_not_reported_as_disk_errors(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as stays, folders.naming_disk_errors(tmp_path):
        raise error
    assert stays.value is error


def test_a_kill_between_the_renames_of_a_replacement_keeps_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 5)
    (tmp_path / "step_000005" / "old").touch()
    rename = Path.rename

    def rename_once(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", die)
        return rename(path, target)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", rename_once)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 5)
    monkeypatch.undo()
    assert folders.list_saved_steps(tmp_path) == []
    folders.restore_replaced_checkpoints(tmp_path)
    assert folders.list_saved_steps(tmp_path) == [5]
    assert (tmp_path / "step_000005" / "old").exists()


def test_a_kill_during_a_deletion_leaves_no_partial_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5)

    def die(path: Path, **_: object) -> None:
        if path.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", die)
        folders.delete_checkpoint(tmp_path / "step_000005")
    assert list(tmp_path.glob("step_*")) == []
    save(tmp_path, 6)
    folders.prune_checkpoints(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000006"]
