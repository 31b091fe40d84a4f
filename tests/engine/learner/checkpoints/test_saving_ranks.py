"""Tests of processes that save checkpoints: their memory, and kills during saves."""

import random
import signal
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from asterism.engine.export.hf_export import BUCKET_BYTES
from asterism.engine.learner.checkpoints.checkpoint_folders import (
    list_saved_steps,
    prune_checkpoints,
    restore_replaced_checkpoints,
)
from asterism.engine.learner.distributed import RankGroup, wait_at_barrier
from asterism.engine.learner.sharding import build_sharded_model, load_sharded_model
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.hf_checkpoint import load_model
from tests.engine.learner.rank_probes import measuring_memory
from tests.engine.learner.rank_processes import run_ranks, start_ranks
from tests.engine.learner.test_sharding import MB, make_config, write_model
from tests.engine.learner.training_examples import rl_sequences, small_run, write_initial_checkpoint
from tests.engine.tiny_models import write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def measure_saving(ranks: RankGroup, checkpoint: Path, out: Path) -> int:
    """Return the peak growth of anonymous memory during a save, in bytes."""
    trainer = Trainer(load_sharded_model(checkpoint, ranks), small_run(export_dtype="bfloat16"), ranks)
    if ranks.is_leader:
        write_tokenizer(out / "tokenizer")
    wait_at_barrier(ranks)
    trainer.start_stage("rl")
    trainer.run_rl_step(rl_sequences(0, groups=1, size=2))
    with measuring_memory() as peak:
        trainer.save(out / "step_000001", out / "tokenizer", max_shard_bytes=128 * MB)
        trainer.finish_saving()
    return peak.growth


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_saving_300_mb_takes_the_memory_of_a_share_and_two_buckets(ranks: int, tmp_path: Path) -> None:
    """The 300 MB do not include the optimizer's moments, which are twice as large."""
    model = write_model(tmp_path / "model", make_config(num_layers=11, vocab_size=40_001))
    assert model.num_bytes > 300 * MB
    (tmp_path / "out").mkdir()
    for growth in run_ranks(ranks, measure_saving, model.folder, tmp_path / "out"):
        assert growth < model.num_bytes / ranks + 2 * BUCKET_BYTES + 150 * MB
    exported = load_model(tmp_path / "out" / "step_000001")
    assert sum(4 * parameter.numel() for parameter in exported.parameters()) == model.num_bytes


def save_in_a_loop(_ranks: RankGroup, checkpoint: Path, out: Path, committed: "Connection[int, int]") -> None:
    """Replace OUT/step_000000 and save OUT/step_S in turn, and send each saved step, until the process is killed."""
    restore_replaced_checkpoints(out)
    trainer = Trainer(load_sharded_model(checkpoint, RankGroup()), small_run(), RankGroup())
    trainer.start_stage("rl")
    for step in range(10**6):
        trainer.step = 0 if step % 2 else step

        def report(step: int = trainer.step) -> None:
            prune_checkpoints(out, 2)
            committed.send(step)

        folder = out / f"step_{trainer.step:06d}"
        trainer.save(folder, out.parent / "tokenizer", max_shard_bytes=40_000, on_committed=report)
        trainer.run_rl_step(rl_sequences(0, groups=1, size=2))


def kill_while_saving(folder: Path, num_checkpoints: int, delay_s: float) -> list[int]:
    """Kill the saving process `delay_s` after it has saved this number of checkpoints. Return the steps it has sent."""
    receiver, sender = Pipe(duplex=False)
    with start_ranks(1, save_in_a_loop, folder / "model", folder / "out", sender, out=folder) as (process,):
        reported = [receiver.recv() for _ in range(num_checkpoints)]
        process.join(delay_s)
        assert process.is_alive()
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        while receiver.poll():
            reported.append(receiver.recv())
    return reported


def load_newest(out: Path) -> int:
    """Restore interrupted replacements, load all complete checkpoints, and return the newest step."""
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
        reported = kill_while_saving(tmp_path, draws.randint(1, 3), delay_s)
        assert load_newest(tmp_path / "out") >= max(reported)
