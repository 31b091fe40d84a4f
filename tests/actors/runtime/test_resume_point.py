"""A run chooses the step at which it resumes when its newest checkpoints are damaged."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from asterism.actors.launch.launcher import roll_back_to
from asterism.actors.runtime.resume_point import NotResumable, choose_resume_step, find_cursor
from asterism.bus.codec import encode
from asterism.bus.event_log.writer import EventLog
from asterism.bus.messages import BufferCursor, Envelope, StepCollected, StepCounts
from asterism.configs.file_manifest import list_files, write_manifest
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.batches.batch_journal import BatchJournal
from asterism.engine.learner.checkpoints.checkpoint_folders import (
    TrainerState,
    get_tensors_folder,
    list_saved_steps,
    write_trainer_state,
)
from tests.engine.learner.learner_settings import change_learner

RUN = RunConfig(name="run")


def save(checkpoint: Path, step: int) -> None:
    get_tensors_folder(checkpoint).mkdir(parents=True)
    (get_tensors_folder(checkpoint) / "__0_0.distcp").write_bytes(bytes(1000))
    (checkpoint / "model.safetensors").write_bytes(bytes(1000))
    write_trainer_state(checkpoint, TrainerState("rl", step, ranks=1, seed=0))
    write_manifest(checkpoint, list_files(checkpoint))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Make a run with five steps, with checkpoints of 0, 3 and 5."""
    folder = RunFolder(tmp_path)
    for step in (0, 3, 5):
        save(folder.get_checkpoint_path(step), step)
    log = EventLog(folder.events / "head.sqlite")
    for step in range(1, 6):
        collected = StepCollected(step, 0, StepCounts(), {}, BufferCursor(step))
        log.append(0.0, "recipe", "buffer", "StepCollected", None, encode(Envelope("buffer", "recipe", collected)))
    log.close()
    lines = [f'{{"kind":"step","step":{step}}}\n' for step in range(1, 6)]
    folder.metrics.write_text("".join(lines))
    return folder


def damage(folder: RunFolder, step: int, name: str = "trainer/tensors/__0_0.distcp") -> Path:
    path = folder.get_checkpoint_path(step) / name
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    return path


def choose(folder: RunFolder, run: RunConfig = RUN) -> tuple[int | None, list[str]]:
    lines: list[str] = []
    return choose_resume_step(folder, run, lines.append), lines


def test_the_newest_undamaged_checkpoint_is_chosen_without_output(folder: RunFolder) -> None:
    assert choose(folder) == (5, [])


def test_a_damaged_newest_checkpoint_is_set_aside_and_an_older_one_is_used(folder: RunFolder) -> None:
    path = damage(folder, 5)
    step, (line,) = choose(folder)
    assert step == 3
    assert line.startswith(f"the checkpoint of step 5 is damaged ({path}: damaged")
    assert line.endswith(f"it is set aside as {folder.checkpoints / 'step_000005.damaged'}")
    assert list_saved_steps(folder.checkpoints) == [0, 3]
    assert len(list_files(folder.checkpoints / "step_000005.damaged")) == 3  # all files are kept
    assert choose(folder) == (3, [])


def test_cursor_batches_and_metrics_are_those_of_the_older_checkpoint(folder: RunFolder) -> None:
    BatchJournal(folder.batches).write(6, b"batch")
    damage(folder, 5)
    step, _ = choose(folder)
    assert step == 3
    roll_back_to(folder, step)
    assert find_cursor(folder.events / "head.sqlite", step).position == 3
    assert folder.metrics.read_text().splitlines()[-1] == '{"kind":"step","step":3}'
    assert BatchJournal(folder.batches).list_steps() == []
    assert (folder.checkpoints / "step_000005.damaged").is_dir()


def test_several_damaged_checkpoints_fall_back_to_step_0(folder: RunFolder) -> None:
    damage(folder, 5)
    damage(folder, 3, "asterism-manifest.json")
    step, lines = choose(folder)
    assert (step, len(lines)) == (0, 2)


def test_a_checkpoint_that_lost_its_state_file_is_named(folder: RunFolder) -> None:
    (folder.get_checkpoint_path(5) / "trainer" / "state.json").unlink()
    step, (line,) = choose(folder)
    assert step == 3
    assert "the checkpoint of step 5 is damaged" in line
    assert "trainer/state.json: missing" in line


def test_without_an_undamaged_checkpoint_every_resume_is_refused_with_a_remedy(folder: RunFolder) -> None:
    for each in (0, 3, 5):
        damage(folder, each)
    for _ in range(2):
        with pytest.raises(NotResumable, match=r"no whole checkpoint; damaged are step_000000\.damaged.* --overwrite"):
            choose(folder)


def test_a_damaged_export_does_not_prevent_training(folder: RunFolder) -> None:
    damage(folder, 5, "model.safetensors")
    assert choose(folder) == (5, [])


def test_a_damaged_step_0_is_refused_if_training_needs_its_weights(folder: RunFolder) -> None:
    path = damage(folder, 0)
    assert choose(folder) == (5, [])
    with pytest.raises(NotResumable, match=rf"{path}: damaged.*only this checkpoint has the weights before RL"):
        choose(folder, replace(RUN, learner=change_learner(RUN.learner, kl_coef=0.1)))


def test_a_damaged_checkpoint_within_the_cold_start_restarts_the_cold_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save(folder.partial_cold_start, 40)
    path = folder.partial_cold_start / "trainer" / "state.json"
    path.write_bytes(path.read_bytes().replace(b"40", b"41"))
    step, lines = choose(folder)
    assert step is None
    assert "the checkpoint within the cold start is damaged" in lines[0]
    assert lines[1] == "the cold start begins again"
    assert not folder.partial_cold_start.exists()


def test_a_checkpoint_of_an_older_version_has_no_manifest_and_is_used(folder: RunFolder) -> None:
    (folder.get_checkpoint_path(5) / "asterism-manifest.json").unlink()
    assert choose(folder) == (5, [])
