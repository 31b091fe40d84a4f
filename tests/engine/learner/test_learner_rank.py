"""Tests of one rank of the learner in the test's process: cold start, steps, checkpoints and resuming."""

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from asterism.bus.messages import ProtocolError, TrainingSample
from asterism.configs.atomic_write import DiskError
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import SftFileConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.batches.batch_journal import BatchJournal
from asterism.engine.learner.checkpoints import checkpoint as checkpoint_module
from asterism.engine.learner.checkpoints.checkpoint_folders import list_saved_steps
from asterism.engine.learner.distributed import RankGroup, gather_full_parameters
from asterism.engine.learner.learner_rank import CheckpointNotFound, LearnerRank
from asterism.engine.model.hf_checkpoint import load_model
from asterism.engine.weight_transfer.shared_memory import load_published
from tests.engine.learner.adapters.adapted_models import SETTINGS
from tests.engine.learner.learner_runs import OpenRank, make_run, no_report, saved_weights, train_step
from tests.engine.learner.learner_settings import change_learner
from tests.engine.learner.training_examples import rows, store_batch

TIMEOUT_S = 60
pytestmark = [
    *(pytest.mark.slow, pytest.mark.real_clock, pytest.mark.timeout(2 * TIMEOUT_S)),
    pytest.mark.usefixtures("sweep"),
]


def test_without_a_cold_start_step_0_is_the_initial_model(open_rank: OpenRank, tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0)
    rank = open_rank(run, folder)
    trained = rank.start(None, no_report)
    assert trained.published is not None
    assert (trained.step, trained.published.version) == (0, 0)
    rank.finish_saving()
    initial, saved = (gather_full_parameters(load_model(folder.checkpoints / name)) for name in ("init", "step_000000"))
    torch.testing.assert_close(saved, initial, rtol=0, atol=0)


@pytest.fixture
def made(tmp_path: Path) -> tuple[RunConfig, RunFolder]:
    """Make a run without a cold start that saves each step."""
    return make_run(tmp_path, sft_steps=0, every=1)


@pytest.fixture
def folder(made: tuple[RunConfig, RunFolder]) -> RunFolder:
    return made[1]


@pytest.fixture
def rank(open_rank: OpenRank, made: tuple[RunConfig, RunFolder]) -> LearnerRank:
    """Open a rank of the run and start it at step 0."""
    rank = open_rank(*made)
    assert rank.start(None, no_report).published is not None
    return rank


def train_without_rows(rank: LearnerRank, *steps: int) -> None:
    """Run these steps with empty batches, and save them if they are due."""
    for step in steps:
        rank.train(step, [])
        rank.save_if_due()


def test_only_the_next_step_can_be_trained(rank: LearnerRank, tmp_path: Path) -> None:
    sequences = store_batch(tmp_path / "batches", 1, rows(1))
    for step in (0, 2):
        with pytest.raises(ProtocolError, match=f"step {step} cannot be trained after step 0"):
            rank.train(step, sequences)
    assert rank.train(1, sequences).step == 1


def test_a_resumed_learner_publishes_the_metrics_and_probes_of_its_checkpoint(
    open_rank: OpenRank, made: tuple[RunConfig, RunFolder]
) -> None:
    rank, folder = open_rank(*made), made[1]
    assert rank.start(None, no_report).metrics == {}
    first = train_step(rank, folder, 1)
    rank.save_if_due()
    rank.finish_saving()
    resumed = open_rank(*made)
    again = resumed.start(None, no_report)
    assert (again.step, again.metrics) == (1, first.metrics)
    assert "loss" in again.metrics
    later = [train_step(each, folder, 2) for each in (rank, resumed)]
    probes = [each.published and each.published.probe for each in (first, again, *later)]
    assert None not in probes
    assert probes[0] == probes[1]
    assert probes[2] == probes[3]


def test_the_last_step_is_published_with_a_probe_even_without_its_batch(rank: LearnerRank, folder: RunFolder) -> None:
    published = train_step(rank, folder, 1, is_last=True).published
    assert BatchJournal(folder.batches).list_steps() == []
    assert published is not None
    assert published.probe is not None
    assert published.probe.chosen_at == 1


def test_after_resuming_the_kl_term_still_refers_to_the_weights_before_rl(open_rank: OpenRank, tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0, every=1, kl_coef=0.1, minibatches=1)
    figures = list[float]()
    for step in (1, 2):
        rank = open_rank(run, folder)
        rank.start(None, no_report)
        figures.append(train_step(rank, folder, step).metrics["kl_reference"])
        rank.save_if_due()
        rank.close()
    assert figures[0] == pytest.approx(0.0, abs=1e-9)  # before the first update
    assert figures[1] > 1e-6


def test_weights_that_are_not_finite_are_reported_before_the_first_step(open_rank: OpenRank, tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0)
    checkpoint = folder.checkpoints / "init" / "model.safetensors"
    weights = load_file(checkpoint)
    weights["model.norm.weight"][2] = float("nan")
    save_file(weights, checkpoint, {"format": "pt"})
    message = r"not finite after step 0, first in model\.norm\.weight.* model\.checkpoint"
    with pytest.raises(UnusableInput, match=message):
        open_rank(run, folder).start(None, no_report)


def test_the_last_max_staleness_plus_one_versions_are_readable(open_rank: OpenRank, tmp_path: Path) -> None:
    run, folder = make_run(tmp_path, sft_steps=0)
    rank = open_rank(replace(run, rl=replace(run.rl, max_staleness=2, prompts=8)), folder)
    published = [rank.start(0, no_report).published, *(rank.train(step, []).published for step in (1, 2))]
    model = load_model(folder.checkpoints / "init")
    for each in published:
        assert each is not None
        load_published(each, dict(model.named_parameters()), torch.float32)


def test_resuming_from_a_step_without_a_checkpoint_is_refused(open_rank: OpenRank, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="step_000007: no checkpoint to resume from"):
        open_rank(*make_run(tmp_path)).start(7, no_report)


def test_a_repeated_step_has_the_metrics_of_a_published_step(rank: LearnerRank, tmp_path: Path) -> None:
    """An incarnation that repeats steps publishes only the last of these steps. The recipe gets all metrics."""
    batches = [store_batch(tmp_path / "batches", step, rows(step)) for step in (1, 2)]
    repeated, published = rank.train(1, batches[0], publish=False).metrics, rank.train(2, batches[1]).metrics
    assert repeated.keys() == published.keys()
    assert repeated["publish_bytes"] == published["publish_bytes"] > 0


def of_version(version: int) -> list[TrainingSample]:
    """Return the same rows as if this version had generated them."""
    samples = rows(1)
    versions = [np.frombuffer(sample.record.versions, np.int32) for sample in samples]
    changed = [np.where(each < 0, each, version).astype(np.int32).tobytes() for each in versions]
    return [
        replace(sample, record=replace(sample.record, versions=each))
        for sample, each in zip(samples, changed, strict=True)
    ]


@pytest.mark.parametrize("keep", [True, False])
def test_rl_continues_with_weights_and_moments_of_another_run(open_rank: OpenRank, tmp_path: Path, keep: bool) -> None:
    """If moments continue, the next update equals that of the other run, even after a resume from step 0."""
    settings: dict[str, Any] = {"warmup_steps": 0, "final_lr_fraction": 1.0, "minibatches": 1}
    run, folder = make_run(tmp_path / "a", sft_steps=0, every=1, **settings)
    first = open_rank(run, folder)
    first.start(None, no_report)
    for step in (1, 2, 3):
        first.train(step, store_batch(tmp_path / "a", step, of_version(step - 1)), is_last=True)
    first.close()
    checkpoint = str(folder.get_checkpoint_path(2))
    _, other_folder = make_run(tmp_path / "b", sft_steps=0)
    learner = change_learner(run.learner, resume_from=checkpoint, resume_optimizer=keep)
    other = replace(run, learner=learner, model=replace(run.model, checkpoint=checkpoint))
    for resume_step in (None, 0):
        second = open_rank(other, other_folder)
        assert second.start(resume_step, no_report).step == 0
        second.train(1, store_batch(tmp_path / "b", 1, of_version(0)), is_last=True)
        second.close()
        weights, expected = saved_weights(other_folder, 1), saved_weights(folder, 3)
        difference = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
        assert (difference < 1e-6) is keep, difference  # the sums have another order
    start, end = saved_weights(other_folder, 0), saved_weights(folder, 2)
    assert all(torch.equal(start[name], end[name]) for name in end)


def test_a_cold_start_draws_from_the_files_of_a_mixture(open_rank: OpenRank, tmp_path: Path) -> None:
    run, folder = make_run(tmp_path)
    other = (folder.data / "sft.jsonl").read_text().replace("One and one.", "Two ones make two.")
    (folder.data / "other.jsonl").write_text(other)
    first = SftFileConfig(name="first", data="$RUN/data/sft.jsonl")
    second = SftFileConfig(name="second", data="$RUN/data/other.jsonl", weight=0.5)
    digests: list[str] = []
    for mixture in ((), (first,), (first, second)):
        rank = open_rank(replace(run, sft=replace(run.sft, mixture=mixture)), folder)
        started = rank.start(None, no_report)
        assert started.metrics["sft_steps"] == 3
        assert started.published is not None
        digests.append(started.published.digest)
        rank.close()
        shutil.rmtree(folder.checkpoints / "step_000000")
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("settings", [{}, SETTINGS], ids=["all weights", "adapters"])
def test_a_killed_cold_start_resumes_from_its_partial_checkpoint(
    open_rank: OpenRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """The cold start trains all weights. Adapters are added afterwards, when its last save can still be running."""
    run, folder = make_run(tmp_path, **settings)
    monkeypatch.setattr("asterism.engine.learner.checkpoints.checkpoint_schedule.SFT_SAVE_EVERY", 2)

    def kill_at_three(step: int, _values: dict[str, float]) -> None:
        if step == 3:
            raise KeyboardInterrupt

    killed = open_rank(run, folder)
    with pytest.raises(KeyboardInterrupt):
        killed.start(None, kill_at_three)
    killed.close()
    assert not (folder.partial_cold_start / "model.safetensors").exists()
    seen: list[int] = []
    resumed = open_rank(run, folder)
    resumed.start(None, lambda step, values: seen.append(step))
    resumed.close()
    assert seen == [3]
    assert not (folder.checkpoints / "sft_partial").exists()
    straight_run, straight_folder = make_run(tmp_path / "straight")
    straight = open_rank(straight_run, straight_folder)
    straight.start(None, no_report)
    straight.close()
    found, initial = saved_weights(folder, 0), load_model(folder.checkpoints / "init").state_dict()
    torch.testing.assert_close(found, saved_weights(straight_folder, 0), rtol=0, atol=0)
    assert not any(torch.equal(each, initial[name]) for name, each in found.items())


@pytest.mark.parametrize(
    ("settings", "is_exported"),
    [
        ({}, {0: True, 4: True, 6: True}),
        ({"keep": 9, "export_every": 3}, {0: True, 2: False, 3: True, 4: False, 6: True}),
    ],
    ids=["all exported", "each third exported"],
)
def test_step_0_and_the_last_checkpoint_are_kept_and_some_are_exported(
    open_rank: OpenRank, tmp_path: Path, settings: dict[str, int], is_exported: dict[int, bool]
) -> None:
    run, folder = make_run(tmp_path, sft_steps=0, **settings)
    rank = open_rank(run, folder)
    rank.start(None, no_report)
    train_without_rows(rank, *range(1, 7))
    saved = list_saved_steps(folder.checkpoints)  # the last step waits until its checkpoint is written
    rank.close()
    found = {step: (folder.get_checkpoint_path(step) / "model.safetensors").exists() for step in saved}
    assert found == is_exported


def test_batches_are_deleted_only_after_their_checkpoint_is_complete(
    made: tuple[RunConfig, RunFolder], folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, seen = BatchJournal(folder.batches), list[list[int]]()

    def record_saved(_step: int) -> None:
        seen.append(list_saved_steps(folder.checkpoints))

    monkeypatch.setattr(journal, "delete_up_to", record_saved)
    rank = LearnerRank(*made, RankGroup(), journal)
    rank.start(None, no_report)
    train_without_rows(rank, 1, 2)
    rank.close()
    assert [saved[-1] for saved in seen] == [1, 2]


def test_a_failed_write_of_a_checkpoint_ends_the_next_step(
    rank: LearnerRank, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.finish_saving()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "write_shard", fail)
    train_without_rows(rank, 1)
    with pytest.raises(DiskError, match=r"/\.step_000001\.building: No space left on device"):
        train_without_rows(rank, 2)
    rank.close()
    assert list_saved_steps(folder.checkpoints) == [0]


def test_weights_are_published_before_they_are_saved_except_in_the_last_step(
    open_rank: OpenRank, made: tuple[RunConfig, RunFolder], folder: RunFolder
) -> None:
    last = 3
    rank = open_rank(replace(made[0], rl=replace(made[0].rl, steps=last)), folder)
    rank.start(None, no_report)
    for step in range(1, last):
        trained = rank.train(step, [])
        assert trained.published is not None
        rank.finish_saving()
        assert list_saved_steps(folder.checkpoints)[-1] == step - 1
        rank.save_if_due()
        rank.finish_saving()
        assert list_saved_steps(folder.checkpoints)[-1] == step
    rank.train(last, [])
    assert list_saved_steps(folder.checkpoints)[-1] == last
