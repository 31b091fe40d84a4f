"""`python -m benchmarks.support.reading_learner RUN_FOLDER`: learner ranks without a model, for benchmarks.batches."""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import uvloop

from asterism.bus.process.process_main import pausing_garbage_collector
from asterism.bus.transport.zeromq import open_zmq_bus
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from benchmarks.support.loop_lag import measuring_lag

with pausing_garbage_collector():  # like engine/learner/__main__.py
    import torch.distributed as dist

    from asterism.engine.learner.batches.batch_journal import BatchJournal
    from asterism.engine.learner.batches.minibatches import build_micro_batch, build_rl_minibatches
    from asterism.engine.learner.batches.packing import split_micro_batches
    from asterism.engine.learner.batches.sample_exchange import exchange_samples
    from asterism.engine.learner.batches.sample_files import StoredSequence, count_bytes
    from asterism.engine.learner.distributed import RankGroup, broadcast_object, join_ranks, leave_ranks
    from asterism.engine.learner.learner import Learner, train_broadcast_batches
    from asterism.engine.learner.learner_rank import TrainStepResult

MICRO_BATCH_TOKENS = 16_384
NUM_MINIBATCHES = 4


def read_process_bytes() -> int:
    """Return all bytes that this process has read, from files and sockets."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


class ReadingRank:
    """The part of LearnerRank that the learner calls; it reads the samples of its share and does not train."""

    def __init__(self, ranks: RankGroup, get_lag_s: Callable[[], float]) -> None:
        self._ranks, self._get_lag_s = ranks, get_lag_s

    def start(self, *_: object) -> TrainStepResult:
        return TrainStepResult(0, {}, None)

    def train(self, step: int, sequences: Sequence[StoredSequence], *, publish: bool, is_last: bool) -> TrainStepResult:
        began, before = time.monotonic(), read_process_bytes()
        minibatches = [
            (each, split_micro_batches(each, self._ranks.world_size, MICRO_BATCH_TOKENS))
            for each in build_rl_minibatches(sequences, NUM_MINIBATCHES, 0, step)
        ]
        exchanged = exchange_samples(self._ranks, minibatches)
        tokens = 0
        for (_, shares), minibatch in zip(minibatches, exchanged, strict=True):
            for indices in shares[self._ranks.rank]:
                loaded = [minibatch[index].load() for index in indices]
                tokens += len(build_micro_batch(loaded, [1.0] * len(loaded)).targets_N)
        found: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(found, (read_process_bytes() - before, tokens))
        total = count_bytes(sequences)
        metrics = {
            "read_share": max(num_bytes for num_bytes, _ in found) / total,
            "loss_tokens": float(sum(tokens for _, tokens in found)),
            "read_s": time.monotonic() - began,
            "learner_lag_s": self._get_lag_s(),
        }
        return TrainStepResult(step, metrics, None)

    def save_if_due(self) -> None:
        """Do nothing: the rank has no checkpoints."""


async def lead(folder: RunFolder, ranks: RankGroup) -> None:
    run = load_run(folder.config)
    bus = open_zmq_bus("learner", folder.sockets, run.bus.queue_messages)
    with measuring_lag() as lag, ThreadPoolExecutor(1) as worker:
        rank = cast(Any, ReadingRank(ranks, lambda: lag.longest_s))
        learner = Learner(bus, run, rank, ranks, worker, BatchJournal(folder.batches))
        await learner.run(None)
    await bus.close()


def main() -> None:
    folder = RunFolder(Path(sys.argv[1]))
    ranks = join_ranks(load_run(folder.config).learner)
    if ranks.is_leader:
        uvloop.run(lead(folder, ranks))
        broadcast_object(ranks, None)
    else:
        train_broadcast_batches(cast(Any, ReadingRank(ranks, lambda: 0.0)), ranks)
    leave_ranks(ranks)


if __name__ == "__main__":
    main()
