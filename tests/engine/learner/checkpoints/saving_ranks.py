"""`python -m tests.engine.learner.checkpoints.saving_ranks MODE CHECKPOINT OUT`: ranks that save checkpoints.

`memory`: each rank trains one step, saves, and writes the growth of its anonymous memory to OUT/RANK.json.
`loop`: one rank replaces OUT/step_000000 and saves OUT/step_S after each of its steps until it is killed, and prints
the name of each complete checkpoint.
"""

import sys
from pathlib import Path

import msgspec
import torch

from asterism.engine.learner.checkpoints.checkpoint_folders import prune_checkpoints, restore_replaced_checkpoints
from asterism.engine.learner.distributed import RankGroup, join_ranks, leave_ranks, wait_at_barrier
from asterism.engine.learner.sharding import load_sharded_model
from asterism.engine.learner.trainer import Trainer
from tests.engine.learner.rank_probes import measuring_memory
from tests.engine.learner.training_examples import rl_sequences, small_run
from tests.engine.tiny_models import write_tokenizer

SHARD_BYTES = 128 * 10**6


class SavingReport(msgspec.Struct, frozen=True):
    saving_bytes: int  # peak growth of anonymous memory during a save


def measure_memory(checkpoint: Path, out: Path) -> None:
    run = small_run(export_dtype="bfloat16")
    ranks = join_ranks(run.learner)
    trainer = Trainer(load_sharded_model(checkpoint, ranks), run, ranks)
    if ranks.is_leader:
        write_tokenizer(out / "tokenizer")
    wait_at_barrier(ranks)
    trainer.start_stage("rl")
    trainer.run_rl_step(rl_sequences(0, groups=1, size=2))
    with measuring_memory() as peak:
        trainer.save(out / "step_000001", out / "tokenizer", max_shard_bytes=SHARD_BYTES)
        trainer.finish_saving()
    (out / f"{ranks.rank}.json").write_bytes(msgspec.json.encode(SavingReport(peak.growth)))
    leave_ranks(ranks)


def save_in_a_loop(checkpoint: Path, out: Path) -> None:
    run = small_run()
    tokenizer = out.parent / "tokenizer"
    restore_replaced_checkpoints(out)
    trainer = Trainer(load_sharded_model(checkpoint, RankGroup()), run, RankGroup())
    trainer.start_stage("rl")
    for step in range(10**6):
        trainer.step = 0 if step % 2 else step
        name = f"step_{trainer.step:06d}"

        def report(name: str = name) -> None:
            prune_checkpoints(out, 2)
            sys.stdout.write(f"{name}\n")
            sys.stdout.flush()

        trainer.save(out / name, tokenizer, max_shard_bytes=40_000, on_committed=report)
        trainer.run_rl_step(rl_sequences(0, groups=1, size=2))


def main(mode: str, checkpoint: str, out: str) -> None:
    torch.set_num_threads(1)
    {"memory": measure_memory, "loop": save_in_a_loop}[mode](Path(checkpoint), Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
