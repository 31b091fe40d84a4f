"""Tests of processes that save checkpoints: their memory, and kills during saves."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from asterism.engine.export.hf_export import BUCKET_BYTES
from asterism.engine.learner.checkpoints.checkpoint_folders import list_saved_steps, restore_replaced_checkpoints
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.sharding import build_sharded_model
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.hf_checkpoint import load_model
from tests.engine.learner.checkpoints.saving_ranks import SavingReport
from tests.engine.learner.rank_processes import run_ranks
from tests.engine.learner.test_sharding import MB, make_config, write_model
from tests.engine.learner.training_examples import small_run, write_initial_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_saving_300_mb_needs_memory_for_a_share_and_two_buckets(ranks: int, tmp_path: Path) -> None:
    """The 300 MB are weights, without the optimizer's moments, which are twice as large."""
    model = write_model(tmp_path / "model", make_config(num_layers=11, vocab_size=40_001))
    assert model.num_bytes > 300 * MB
    (tmp_path / "out").mkdir()
    run_ranks(ranks, "saving_ranks", "memory", str(model.folder), str(tmp_path / "out"))
    reports = [(tmp_path / "out" / f"{rank}.json").read_bytes() for rank in range(ranks)]
    for report in reports:
        growth = msgspec.json.decode(report, type=SavingReport).saving_bytes
        assert growth < model.num_bytes / ranks + 2 * BUCKET_BYTES + 150 * MB
    exported = load_model(tmp_path / "out" / "step_000001")
    assert sum(4 * parameter.numel() for parameter in exported.parameters()) == model.num_bytes


def kill_while_saving(checkpoint: Path, out: Path, num_checkpoints: int, delay_s: float) -> list[str]:
    """Kill the saving process `delay_s` after this number of checkpoints; return the names that it has printed."""
    module = ["-m", "tests.engine.learner.checkpoints.saving_ranks", "loop", str(checkpoint), str(out)]
    process = subprocess.Popen(
        [sys.executable, *module], stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    with process:
        assert process.stdout is not None
        reported = [process.stdout.readline().strip() for _ in range(num_checkpoints)]
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay_s)
        process.kill()
        reported += process.stdout.read().split()
    assert process.returncode == -signal.SIGKILL
    return reported


def load_newest(out: Path) -> int:
    """Restore interrupted replacements and load all complete checkpoints; return the newest step."""
    restore_replaced_checkpoints(out)
    for step in list_saved_steps(out):
        checkpoint = out / f"step_{step:06d}"
        trainer = Trainer(build_sharded_model(checkpoint, RankGroup()), small_run(), RankGroup())
        trainer.load(checkpoint)
        trainer.check_weights()
        load_model(checkpoint)
        assert trainer.step == step
    return list_saved_steps(out)[-1]


@pytest.mark.parametrize("num_kills", [3, pytest.param(50, marks=pytest.mark.nightly)])
def test_kills_during_saves_leave_complete_checkpoints(num_kills: int, tmp_path: Path) -> None:
    write_initial_checkpoint(tmp_path / "model")
    (tmp_path / "out").mkdir()
    draws = random.Random(11)
    for _ in range(num_kills):
        delay_s = draws.uniform(0, 0.3)
        reported = kill_while_saving(tmp_path / "model", tmp_path / "out", draws.randint(1, 3), delay_s)
        newest = max(int(name.removeprefix("step_")) for name in reported)
        assert load_newest(tmp_path / "out") >= newest
