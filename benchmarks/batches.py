"""Measure the path of a batch from the group buffer to two learner ranks over the real bus. Prints a JSON line last.

    python -m benchmarks.batches [--rows 8192] [--tokens 10500] [--quick]

Groups of 16 random trajectories are encoded and sent as the head does, stored by the learner's process, and read by two
ranks that torchrun starts, up to the tensors of their micro batches. There is no model. Lags are the longest delays of
the two event loops; `read_share` is the largest share of the batch's bytes that one rank reads. `--quick`: 256 rows of
500 tokens.
"""

import asyncio
import os
import shutil
import sys
import time

import numpy as np

from asterism.actors.runtime.decider_loop import compute_fingerprint, encode_effects
from asterism.bus.bus import Bus
from asterism.bus.messages import BatchGroup, BatchReady, Message, Shutdown, StepTrained, TokenRecord, TrainingSample
from asterism.bus.transport.zeromq import open_zmq_bus
from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.decider import Send
from asterism.policies.groups.selection import split_accepted_group
from benchmarks.support.benchmark_main import Flag, Options, benchmark_main
from benchmarks.support.loop_lag import measuring_lag

GROUP_SIZE = 16
_PROMPT_TOKENS = 100


def make_group(group_id: int, tokens: int, draws: np.random.Generator) -> list[TrainingSample]:
    """Make a group of trajectories with half to one and a half times `tokens` tokens."""
    samples: list[TrainingSample] = []
    for place in range(GROUP_SIZE):
        count = int(tokens * draws.uniform(0.5, 1.5))
        mask = np.arange(count) >= _PROMPT_TOKENS
        record = TokenRecord(
            prompt_tokens=_PROMPT_TOKENS,
            token_ids=draws.integers(0, 150_000, count, dtype=np.int32).tobytes(),
            loss_mask=mask.astype(np.uint8).tobytes(),
            logprobs=np.where(mask, -1.0, 0.0).astype(np.float32).tobytes(),
            versions=np.where(mask, 0, -1).astype(np.int32).tobytes(),
        )
        samples.append(TrainingSample(group_id * GROUP_SIZE + place, group_id, draws.normal(), record))
    return samples


async def send_batch(head: Bus, rows: int, tokens: int) -> tuple[int, int]:
    """Send a batch and return the bytes of all frames and of the longest frame."""
    draws, num_bytes, longest, groups = np.random.default_rng(0), 0, 0, list[BatchGroup]()
    for group_id in range(rows // GROUP_SIZE):
        samples = await asyncio.to_thread(make_group, group_id, tokens, draws)
        parts = split_accepted_group(1, group_id, samples)
        frames = encode_effects("head/buffer", [Send("learner", part) for part in parts])
        compute_fingerprint(frames)  # a part of the head's work on each event
        for frame in frames:
            await head.send_frame("learner", frame)
        groups.append(BatchGroup(group_id, len(parts)))
        num_bytes, longest = num_bytes + sum(map(len, frames)), max(longest, *map(len, frames))
    await head.send("learner", BatchReady(1, tuple(groups)))
    return num_bytes, longest


async def receive_unless(ended: asyncio.Task[int], head: Bus) -> Message:
    """Receive a message of the learner. Raises RuntimeError if the learner has ended; `ended` is its exit code."""
    received = asyncio.create_task(head.receive())
    await asyncio.wait((received, ended), return_when=asyncio.FIRST_COMPLETED)
    if not received.done():
        received.cancel()
        raise RuntimeError(f"the learner ended with exit code {ended.result()}")
    return received.result().message


async def measure_batch(folder: RunFolder, rows: int, tokens: int) -> dict[str, float]:
    head = open_zmq_bus("head", folder.sockets, 131_072)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [sys.executable, "-m", *torchrun, "benchmarks.support.reading_learner", str(folder.path)]
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    ended = asyncio.create_task(process.wait())
    try:
        assert await receive_unless(ended, head) == StepTrained(0, {})
        with measuring_lag() as lag:
            began = time.monotonic()
            num_bytes, longest = await send_batch(head, rows, tokens)
            trained = await receive_unless(ended, head)
            total_s = time.monotonic() - began
        assert isinstance(trained, StepTrained)
        await head.send("learner", Shutdown())
        await ended
    finally:
        await head.close()
        if process.returncode is None:
            process.terminate()
            await ended
    return {
        "rows": float(rows),
        "gib": num_bytes / 2**30,
        "longest_frame_mib": longest / 2**20,
        "head_lag_s": lag.longest_s,
        "total_s": total_s,
        **trained.metrics,
    }


async def measure(options: Options) -> dict[str, float]:
    folder = RunFolder(options.scratch / "run")
    folder.path.mkdir()
    folder.sockets.mkdir()
    write_resolved(RunConfig(name="batches"), folder.config)
    try:
        return await measure_batch(folder, options.rows, options.tokens)
    finally:
        shutil.rmtree(folder.sockets, ignore_errors=True)


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        Flag("--rows", 8192, "trajectories of the batch", quick=256),
        Flag("--tokens", 10_500, "mean length of a trajectory", quick=500),
        quick="a small batch",
    )
