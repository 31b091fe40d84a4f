"""Tests of learner.memory.offload: between steps the device has no weights or moments. Training gives the same bits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, UntypedStorage
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from asterism.configs.run_folder import RunFolder
from asterism.engine.learner.checkpoints.checkpoint_folders import get_tensors_folder
from asterism.engine.learner.checkpoints.training_state import read_whole_weights
from asterism.engine.learner.distributed import RankGroup, gather_full_parameters, wait_at_barrier
from asterism.engine.learner.learner_rank import LearnerRank
from asterism.engine.learner.sharding import shard_model
from asterism.engine.learner.state_offload import StateOffload
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.hf_checkpoint import load_model
from tests.engine.learner.learner_runs import OpenRank, make_run, no_report, train_step
from tests.engine.learner.rank_processes import run_ranks
from tests.engine.learner.training_examples import rl_sequences, small_run, trainable_model
from tests.engine.tiny_models import write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sweep")]
MODES = ("between_steps", "optimizer")
STEPS, SAVED_BEFORE, SAVED_WHILE_MOVED = 4, 2, (3, 4)


class OffloadReport(msgspec.Struct):
    state_bytes: list[int] = []  # bytes of state on the device after each step; empty without offload
    resident_bytes: list[int] = []  # bytes of the same storages after the release
    policies: set[str] = set()  # offload policies of FSDP's units
    metrics: list[dict[str, float]] = []
    offload_metrics: list[str] = []
    parameters: dict[str, Tensor] = {}


def get_storages(tensors: list[Tensor]) -> list[UntypedStorage]:
    return [(each.to_local() if isinstance(each, DTensor) else each).untyped_storage() for each in tensors]


def list_policies(model: torch.nn.Module) -> set[str]:
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for state in states if (group := state._fsdp_param_group) is not None]
    return {type(group.offload_policy).__name__ for group in groups}


def train_offloaded(ranks: RankGroup, out: Path, settings: dict[str, Any]) -> OffloadReport:
    """Train with a reference model, and free the memory of the device between steps.

    The save of step 2 starts before the state moves to the host. The saves of steps 3 and 4 start afterwards. The
    state returns to the device after the save of step 3 has ended, and during the save of step 4.
    """
    run = small_run(**settings)
    if ranks.is_leader:
        write_tokenizer(out / "tokenizer")
    wait_at_barrier(ranks)
    model, reference = (trainable_model(is_tied=False) for _ in range(2))
    for each in (model, reference):
        shard_model(each, ranks, run.learner.dtype)
    trainer, offload = Trainer(model, run, ranks), StateOffload(run, ranks)
    trainer.set_reference(reference)
    trainer.start_stage("rl")
    report, storages = OffloadReport(), list[UntypedStorage]()

    def collect() -> list[Tensor]:
        state = trainer.collect_state()
        with torch.no_grad():
            storages[:] = get_storages(state)
        report.state_bytes.append(sum(each.nbytes() for each in storages))
        return state

    for step in range(STEPS):
        offload.restore()
        report.metrics.append(trainer.run_rl_step(rl_sequences(step, groups=2)))
        if trainer.step == SAVED_BEFORE:
            trainer.save(out / "step_000002", out / "tokenizer")
        offload.release(collect)
        report.resident_bytes.append(sum(each.nbytes() for each in storages))
        if trainer.step in SAVED_WHILE_MOVED:
            trainer.save(out / f"step_{trainer.step:06d}", out / "tokenizer")
        if trainer.step == SAVED_WHILE_MOVED[0]:
            trainer.finish_saving()
    offload.restore()
    trainer.finish_saving()
    trainer.check_weights()
    report.offload_metrics, report.policies = list(offload.take_metrics()), list_policies(model)
    report.parameters = gather_full_parameters(model)
    return report


def train(folder: Path, count: int, **learner: Any) -> list[OffloadReport]:
    folder.mkdir()
    settings = {"kl_coef": 0.1} | learner
    return run_ranks(count, train_offloaded, folder, settings, learner=small_run(**settings).learner)


def read_tensor_files(out: Path, step: int) -> dict[str, bytes]:
    """Read the saved weights, moments and random states. Equal states have equal bytes."""
    folder = get_tensors_folder(out / f"step_{step:06d}")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("ranks", "dtype", "modes"),
    [
        (2, "bfloat16", MODES),
        pytest.param(1, "float32", MODES, marks=pytest.mark.nightly),
        pytest.param(1, "bfloat16", MODES[:1], marks=pytest.mark.nightly),
        pytest.param(2, "float32", MODES, marks=pytest.mark.nightly),
    ],
)
def test_offload_does_not_change_training_and_checkpoints(
    ranks: int, dtype: str, modes: Sequence[str], tmp_path: Path
) -> None:
    """FSDP pads a shard of the 97 rows of the vocabulary if there are two ranks.

    One rank in float32 whose update is in host memory is compared with a model without FSDP.
    """
    kept, *others = (train(tmp_path / offload, ranks, dtype=dtype, offload=offload) for offload in ("none", *modes))
    shapes = {name: tuple(each.shape) for name, each in kept[0].parameters.items()}
    for mode, found in zip(modes, others, strict=True):
        torch.testing.assert_close(found[0].parameters, kept[0].parameters, rtol=0, atol=0)
        assert [report.metrics for report in found] == [report.metrics for report in kept]
        saved = (
            read_whole_weights(get_tensors_folder(tmp_path / name / "step_000003"), shapes) for name in (mode, "none")
        )
        torch.testing.assert_close(*saved, rtol=0, atol=0)
        if mode == "optimizer":
            assert [report.policies for report in found] == [{"CPUOffloadPolicy"}] * ranks
    for step in (SAVED_BEFORE, *SAVED_WHILE_MOVED):
        assert read_tensor_files(tmp_path / "between_steps", step) == read_tensor_files(tmp_path / "none", step)
    model_bytes = sum(4 * each.numel() for each in kept[0].parameters.values())
    for report in others[0]:
        assert report.resident_bytes == [0] * STEPS
        assert min(report.state_bytes) >= 4 * model_bytes / ranks  # weights, two moments, and the reference model
        assert report.offload_metrics == ["offload_s"]
    assert all(report.state_bytes == [] and report.offload_metrics == [] for report in kept)


# ---------------------------------------------------------------- one rank with its publisher


def count_moved(rank: LearnerRank) -> int:
    """Count the tensors in host memory, and check that they use no memory on the device."""
    moved = rank._offload._moved  # pyright: ignore[reportPrivateUsage]
    assert all(each.on_device.untyped_storage().nbytes() == 0 for each in moved)
    return len(moved)


def train_steps(rank: LearnerRank, folder: RunFolder, *steps: int) -> list[str]:
    """Run these steps, and return the digests of the published weights."""
    results = [train_step(rank, folder, step) for step in steps]
    return [result.published.digest for result in results if result.published is not None]


def test_device_memory_is_free_from_a_publication_to_the_next_step(open_rank: OpenRank, tmp_path: Path) -> None:
    run, folder = make_run(tmp_path / "moved", sft_steps=0, every=1, offload="between_steps")
    rank = open_rank(run, folder)
    assert count_moved(rank) == 0
    assert rank.start(None, no_report, journaled_steps=[1]).published is None
    assert count_moved(rank) == 0  # the learner still uses the engines' memory
    train_step(rank, folder, 1, publish=False)
    assert count_moved(rank) == 0
    metrics = train_step(rank, folder, 2).metrics
    num_parameters = len(gather_full_parameters(load_model(folder.checkpoints / "init")))
    assert count_moved(rank) == 4 * num_parameters  # weights, two moments and a step counter
    assert metrics["offload_s"] > 0


def test_offload_does_not_change_published_and_saved_weights(open_rank: OpenRank, tmp_path: Path) -> None:
    plain_run, plain_folder = make_run(tmp_path, sft_steps=0)
    plain = open_rank(plain_run, plain_folder)
    plain.start(None, no_report)
    expected = train_steps(plain, plain_folder, 1, 2, 3)
    run, folder = make_run(tmp_path / "moved", sft_steps=0, every=1, offload="between_steps")
    rank = open_rank(run, folder)
    rank.start(None, no_report)
    digests = train_steps(rank, folder, 1)
    rank.save_if_due()
    digests += train_steps(rank, folder, 2)
    rank.save_if_due()
    rank.close()
    resumed = open_rank(run, folder)
    assert resumed.start(None, no_report).step == 2
    assert [*digests, *train_steps(resumed, folder, 3)] == expected
