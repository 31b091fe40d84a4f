"""Tests of a trainer's checkpoints: resumed training, writes in the background, and the exported model."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asterism.configs.atomic_write import DiskError
from asterism.configs.file_manifest import MANIFEST_NAME, DamagedFile, list_files, read_manifest
from asterism.engine.hf.weight_files import CheckpointError
from asterism.engine.learner.checkpoints import checkpoint as checkpoint_module
from asterism.engine.learner.checkpoints.checkpoint import CheckpointWriter
from asterism.engine.learner.checkpoints.checkpoint_folders import (
    get_partial_path,
    get_tensors_folder,
    list_saved_steps,
)
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.sharding import build_sharded_model
from asterism.engine.learner.trainer import Trainer
from tests.engine.learner import train_ranks
from tests.engine.learner.training_examples import (
    copy_weights,
    make_trainer,
    rl_sequences,
    sequences,
    small_run,
    trainable_model,
)

pytestmark = pytest.mark.slow
TIMEOUT_S = 60


def save(made: Trainer, checkpoint: Path, tokenizer: Path, **options: Any) -> Path:
    """Save a checkpoint, and wait until it is complete."""
    made.save(checkpoint, tokenizer, **options)
    made.finish_saving()
    return checkpoint


def resume(checkpoint: Path) -> Trainer:
    resumed = Trainer(build_sharded_model(checkpoint, RankGroup()), small_run(), RankGroup())
    resumed.load(checkpoint)
    return resumed


class WriteGate:
    """A gate that stops the background thread of a checkpoint before it reads the tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_open = threading.Event()
        write = checkpoint_module.write_training_state

        def wait_and_write(*arguments: object) -> None:
            assert self._is_open.wait(TIMEOUT_S)
            write(*arguments)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(checkpoint_module, "write_training_state", wait_and_write)

    def open(self) -> None:
        self._is_open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteGate]:
    made = WriteGate(monkeypatch)
    yield made
    made.open()


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_resumed_training_gives_the_same_bits(stage: str, tmp_path: Path, tokenizer: Path) -> None:
    """The export is rounded, but training resumes from exact weights."""
    made = make_trainer(stage, export_dtype="bfloat16")
    steps = train_ranks.steps_of(stage)
    for step in range(2):
        steps(made, step)
    checkpoint = save(made, tmp_path / "step_000002", tokenizer)
    draws = torch.rand(3)
    resumed = resume(checkpoint)
    assert (resumed.stage, resumed.step) == (stage, 2)
    assert torch.equal(torch.rand(3), draws)
    for step in range(2, 4):
        assert steps(resumed, step) == steps(made, step)
    torch.testing.assert_close(copy_weights(resumed), copy_weights(made), rtol=0, atol=0)


def test_saving_does_not_change_later_training(tmp_path: Path, tokenizer: Path) -> None:
    saved, unsaved = make_trainer(), make_trainer()
    saved.save(tmp_path / "step_000000", tokenizer)
    for step in range(2):
        assert saved.run_rl_step(rl_sequences(step)) == unsaved.run_rl_step(rl_sequences(step))
        saved.save(tmp_path / f"step_{step + 1:06d}", tokenizer)
    saved.finish_saving()
    torch.testing.assert_close(copy_weights(saved), copy_weights(unsaved), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "length", "problem"),
    [
        (".metadata", None, r"no training state\..* set model\.checkpoint = '.*/step_000000'"),
        ("__0_0.distcp", None, ""),
        ("__0_0.distcp", 500, ""),
    ],
    ids=["no metadata", "no tensors", "short tensors"],
)
def test_the_error_for_damaged_tensors_names_their_folder(
    tmp_path: Path, tokenizer: Path, name: str, length: int | None, problem: str
) -> None:
    checkpoint = save(make_trainer(), tmp_path / "step_000000", tokenizer)
    if name != ".metadata":
        (checkpoint / MANIFEST_NAME).unlink()  # earlier versions wrote no manifest
    file = get_tensors_folder(checkpoint) / name
    file.unlink() if length is None else os.truncate(file, length)
    with pytest.raises(CheckpointError, match=rf"step_000000/trainer/tensors: {problem}"):
        make_trainer().load(checkpoint)


def test_every_file_of_a_checkpoint_is_in_its_manifest(tmp_path: Path, tokenizer: Path) -> None:
    checkpoint = save(make_trainer(), tmp_path / "step_000000", tokenizer)
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    assert set(manifest.files) == {path.relative_to(checkpoint).as_posix() for path in list_files(checkpoint)}
    assert {"trainer/state.json", "trainer/tensors/.metadata", "model.safetensors"} <= manifest.files.keys()


@pytest.mark.parametrize("name", ["config.json", "trainer/state.json", "trainer/tensors/__0_0.distcp"])
def test_the_error_for_one_changed_byte_names_the_file(tmp_path: Path, tokenizer: Path, name: str) -> None:
    checkpoint = save(make_trainer(), tmp_path / "step_000000", tokenizer)
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / name).write_bytes(content)
    with pytest.raises(DamagedFile, match=rf"step_000000/{name}: damaged"):
        resume(checkpoint)


# ---------------------------------------------------------------- writing in the background


def test_an_update_waits_until_the_checkpoint_has_read_the_weights(
    tmp_path: Path, tokenizer: Path, gate: WriteGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until_read = CheckpointWriter.wait_until_read

    def open_and_wait(writer: CheckpointWriter, *_: object) -> None:
        gate.open()
        wait_until_read(writer)

    monkeypatch.setattr(CheckpointWriter, "wait_until_read", open_and_wait)
    made = make_trainer()
    before = copy_weights(made)
    made.save(tmp_path / "step_000000", tokenizer)
    made.run_rl_step(rl_sequences(0))
    gate.open()
    made.finish_saving()
    torch.testing.assert_close(copy_weights(resume(tmp_path / "step_000000")), before, rtol=0, atol=0)
    assert any(not torch.equal(before[name], after) for name, after in copy_weights(made).items())


def test_a_second_checkpoint_waits_for_the_first(tmp_path: Path, tokenizer: Path, gate: WriteGate) -> None:
    made, committed = make_trainer(), list[str]()
    made.save(tmp_path / "step_000000", tokenizer, on_committed=lambda: committed.append("first"))
    saving = threading.Thread(
        target=made.save,
        args=(tmp_path / "step_000001", tokenizer),
        kwargs={"on_committed": lambda: committed.append("second")},
    )
    saving.start()
    assert committed == []
    assert not get_partial_path(tmp_path / "step_000001").exists()
    gate.open()
    saving.join(TIMEOUT_S)
    assert committed[0] == "first"
    made.finish_saving()
    assert committed == ["first", "second"]


def test_only_a_complete_checkpoint_has_its_final_name(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_trainer()
    made.run_rl_step(rl_sequences(0))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint_module, "write_trainer_state", die)
        save(made, tmp_path / "step_000001", tokenizer)
    assert list_saved_steps(tmp_path) == []
    assert get_partial_path(tmp_path / "step_000001").exists()
    save(made, tmp_path / "step_000001", tokenizer)
    assert list_saved_steps(tmp_path) == [1]
    assert not get_partial_path(tmp_path / "step_000001").exists()


@pytest.mark.parametrize("place", ["tensors", "export", "sync"])
def test_a_later_call_reports_a_full_disk(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    made = make_trainer()
    names = {"tensors": "write_training_state", "export": "write_shard", "sync": "sync_paths"}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, names[place], fail)
        made.save(tmp_path / "step_000001", tokenizer)
        with pytest.raises(DiskError, match=r"/\.step_000001\.building: No space left on device"):
            made.finish_saving()
    assert list_saved_steps(tmp_path) == []
    save(made, tmp_path / "step_000001", tokenizer)
    assert list_saved_steps(tmp_path) == [1]


def test_files_and_folders_are_on_the_disk_before_the_final_rename(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    rename, fsync = Path.rename, checkpoint_module.sync_paths.__globals__["os"].fsync

    def record_sync(descriptor: int) -> None:
        events.append(("sync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        fsync(descriptor)

    def record_rename(path: Path, target: Path) -> Path:
        events.append(("rename", str(path)))
        return rename(path, target)

    monkeypatch.setattr("os.fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    made = make_trainer()
    save(made, tmp_path / "step_000000", tokenizer)
    partial, final = get_partial_path(tmp_path / "step_000000"), tmp_path / "step_000000"
    renamed = events.index(("rename", str(partial)))
    written = [partial, *(partial / path.relative_to(final) for path in final.rglob("*"))]
    assert {("sync", str(path)) for path in written} <= set(events[:renamed])
    assert ("sync", str(tmp_path)) in events[renamed:]


# ---------------------------------------------------------------- contents


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_equal_trainers_write_equal_bytes_in_any_folder(stage: str, tmp_path: Path, tokenizer: Path) -> None:
    written: list[dict[str, bytes]] = []
    for place in ("here", "there/as/well"):
        made = make_trainer(stage)
        made.run_sft_step(sequences(0)) if stage == "sft" else made.run_rl_step(rl_sequences(0))
        folder = tmp_path / place / "step_000001"
        folder.parent.mkdir(parents=True)
        save(made, folder, tokenizer)
        files = (path for path in folder.rglob("*") if path.is_file())
        written.append({str(path.relative_to(folder)): path.read_bytes() for path in files})
    assert written[0].keys() == written[1].keys()
    assert [name for name in written[0] if written[0][name] != written[1][name]] == []


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_export_loads_in_transformers(tmp_path: Path, tokenizer: Path, *, is_tied: bool) -> None:
    """The export has several shards and the default dtype, which is float32 in this test."""
    made = make_trainer(model=trainable_model(is_tied=is_tied))
    made.run_rl_step(rl_sequences(0))
    save(made, tmp_path / "step_000001", tokenizer, max_shard_bytes=40_000)
    assert len(list((tmp_path / "step_000001").glob("model-*-of-*.safetensors"))) > 1
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "step_000001", dtype=torch.float32)
    tokens = torch.from_numpy(sequences(0)[0].token_ids).long()[None]
    with torch.no_grad():
        expected = made.model.compute_logits(made.model(tokens))
        torch.testing.assert_close(exported(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    names = dict(exported.named_parameters())
    assert all(torch.equal(names[name], each) for name, each in made.model.named_parameters())


def test_a_checkpoint_without_an_export_has_no_weights_for_transformers(tmp_path: Path, tokenizer: Path) -> None:
    made = make_trainer()
    save(made, tmp_path / "step_000000", tokenizer, is_exported=False)
    assert list((tmp_path / "step_000000").glob("*.safetensors*")) == []
    torch.testing.assert_close(copy_weights(resume(tmp_path / "step_000000")), copy_weights(made), rtol=0, atol=0)
