"""Tests of learner.memory.offload: between steps the device has no weights and moments, and training gives the same bits."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.checkpoints.checkpoint_folders import get_tensors_folder
from asterism.engine.learner.checkpoints.training_state import read_whole_weights
from asterism.engine.learner.distributed import RankGroup, gather_full_parameters
from asterism.engine.learner.learner_rank import LearnerRank
from asterism.engine.model.hf_checkpoint import load_model
from tests.engine.learner.learner_runs import make_run, no_report
from tests.engine.learner.offload_ranks import SAVED_BEFORE, SAVED_WHILE_MOVED, STEPS, OffloadReport
from tests.engine.learner.rank_processes import run_ranks
from tests.engine.learner.training_examples import rows, small_run, store_batch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sweep")]
KL = {"kl_coef": 0.1}  # with a reference model


class Outcome(msgspec.Struct):
    reports: list[OffloadReport]
    parameters: dict[str, Tensor]
    folder: Path


def train(folder: Path, ranks: int, **learner: Any) -> Outcome:
    folder.mkdir()
    run_ranks(ranks, "offload_ranks", str(folder), msgspec.json.encode(KL | learner).decode())
    reports = [msgspec.json.decode((folder / f"{rank}.json").read_bytes(), type=OffloadReport) for rank in range(ranks)]
    return Outcome(reports, torch.load(folder / "parameters.pt", weights_only=True), folder)


def read_tensor_files(outcome: Outcome, step: int) -> dict[str, bytes]:
    """Read the saved weights, moments and random states: equal states have equal bytes."""
    folder = get_tensors_folder(outcome.folder / f"step_{step:06d}")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        pytest.param(1, "float32", marks=pytest.mark.nightly),
        (1, "bfloat16"),
        pytest.param(2, "float32", marks=pytest.mark.nightly),
    ],
)
def test_a_state_that_moves_between_steps_trains_and_saves_the_same_bits(
    ranks: int, dtype: str, tmp_path: Path
) -> None:
    """On two ranks FSDP pads a shard of the 97 vocabulary rows."""
    kept = train(tmp_path / "kept", ranks, dtype=dtype)
    moved = train(tmp_path / "moved", ranks, dtype=dtype, offload="between_steps")
    torch.testing.assert_close(moved.parameters, kept.parameters, rtol=0, atol=0)
    assert [report.metrics for report in moved.reports] == [report.metrics for report in kept.reports]
    for step in (SAVED_BEFORE, *SAVED_WHILE_MOVED):
        assert read_tensor_files(moved, step) == read_tensor_files(kept, step)
    model_bytes = sum(4 * each.numel() for each in kept.parameters.values())
    for report in moved.reports:
        assert report.resident_bytes == [0] * STEPS
        assert min(report.state_bytes) >= 4 * model_bytes / ranks  # weights, two moments, reference
        assert report.offload_metrics == ["offload_s"]
    assert all(report.state_bytes == [] and report.offload_metrics == [] for report in kept.reports)


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        pytest.param(1, "float32", marks=pytest.mark.nightly),
        pytest.param(2, "float32", marks=pytest.mark.nightly),
        (2, "bfloat16"),
    ],
)
def test_an_update_in_main_memory_gives_the_same_bits(ranks: int, dtype: str, tmp_path: Path) -> None:
    """One rank in float32 is compared with a model without FSDP."""
    on_device = train(tmp_path / "device", ranks, dtype=dtype)
    on_host = train(tmp_path / "host", ranks, dtype=dtype, offload="optimizer")
    torch.testing.assert_close(on_host.parameters, on_device.parameters, rtol=0, atol=0)
    assert [report.metrics for report in on_host.reports] == [report.metrics for report in on_device.reports]
    assert [report.policies for report in on_host.reports] == [["CPUOffloadPolicy"]] * ranks
    shapes = {name: tuple(each.shape) for name, each in on_device.parameters.items()}
    saved = [
        read_whole_weights(get_tensors_folder(each.folder / "step_000003"), shapes) for each in (on_host, on_device)
    ]
    torch.testing.assert_close(saved[0], saved[1], rtol=0, atol=0)


# ---------------------------------------------------------------- one rank with its publisher


def make_offloading_run(path: Path) -> tuple[RunConfig, RunFolder]:
    path.mkdir()
    run, folder = make_run(path, sft_steps=0, every=1)
    offloading = small_run(offload="between_steps", every=1)
    return replace(offloading, sft=run.sft), folder


def count_moved(rank: LearnerRank) -> int:
    """Count the tensors in main memory, and check that these tensors have no memory on the device."""
    moved = rank._offload._moved  # pyright: ignore[reportPrivateUsage]
    assert all(each.on_device.untyped_storage().nbytes() == 0 for each in moved)
    return len(moved)


def train_steps(rank: LearnerRank, folder: RunFolder, *steps: int) -> list[str]:
    """Train steps; return the digests of the published weights."""
    results = [rank.train(step, store_batch(folder.batches, step, rows(step))) for step in steps]
    return [result.published.digest for result in results if result.published is not None]


def test_the_memory_is_free_from_a_publication_to_the_next_step(tmp_path: Path) -> None:
    run, folder = make_offloading_run(tmp_path / "moved")
    rank = LearnerRank(run, folder, RankGroup())
    assert count_moved(rank) == 0
    assert rank.start(None, no_report, journaled_steps=[1]).published is None
    assert count_moved(rank) == 0  # the engines' memory is still lent
    sequences = store_batch(folder.batches, 1, rows(1))
    rank.train(1, sequences, publish=False)
    assert count_moved(rank) == 0
    metrics = rank.train(2, store_batch(folder.batches, 2, rows(2))).metrics
    num_parameters = len(gather_full_parameters(load_model(folder.checkpoints / "init")))
    assert count_moved(rank) == 4 * num_parameters  # weights, two moments and a number of steps
    assert metrics["offload_s"] > 0
    rank.close()


def test_weights_are_published_and_saved_as_without_offload(tmp_path: Path) -> None:
    plain_run, plain_folder = make_run(tmp_path, sft_steps=0)
    plain = LearnerRank(plain_run, plain_folder, RankGroup())
    plain.start(None, no_report)
    expected = train_steps(plain, plain_folder, 1, 2, 3)
    plain.close()
    run, folder = make_offloading_run(tmp_path / "moved")
    rank = LearnerRank(run, folder, RankGroup())
    rank.start(None, no_report)
    digests = train_steps(rank, folder, 1)
    rank.save_if_due()
    digests += train_steps(rank, folder, 2)
    rank.save_if_due()
    rank.close()
    resumed = LearnerRank(run, folder, RankGroup())
    assert resumed.start(None, no_report).step == 2
    assert [*digests, *train_steps(resumed, folder, 3)] == expected
    resumed.close()
