"""Measures trained tokens per second of the learner and of transformers with equal micro batches sorted by length."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from asterism.configs.schema.algorithm import RlConfig
from asterism.configs.schema.learner_config import LearnerConfig, LossConfig, MemoryConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.batches.training_sequence import TrainingSequence
from asterism.engine.learner.distributed import RankGroup, join_ranks, leave_ranks
from asterism.engine.learner.sharding import shard_model
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.hf_checkpoint import load_model
from benchmarks.real.machine_limits import MachineLimits
from benchmarks.real.real_workload import RealWorkload, draw_training_sequences
from benchmarks.support.benchmark_main import compute_median_ratio
from benchmarks.support.transformers_training import PaddedTraining


def make_run(work: RealWorkload) -> RunConfig:
    learner = LearnerConfig(
        dtype=work.dtype,  # pyright: ignore[reportArgumentType]
        threads=work.threads,
        compile=work.compiles,
        memory=MemoryConfig(micro_batch_tokens=work.micro_batch_tokens),
        loss=LossConfig(old_logprobs="engine", correction="none", mismatch_limit=0.0),
    )
    return RunConfig(name="benchmark", rl=RlConfig(steps=1_000_000), learner=learner)


def measure_training(work: RealWorkload, limits: MachineLimits | None) -> dict[str, float]:
    """Measure both in turns, on the same sequences; an update includes clipping and AdamW."""
    torch.set_num_threads(work.threads)
    run = make_run(work)
    ranks = RankGroup() if work.dtype == "float32" else join_ranks(run.learner)
    try:
        model = load_model(work.model)
        shard_model(model, ranks, work.dtype)
        trainer = Trainer(model, run, ranks)
        padded = PaddedTraining(work.config, work.micro_batch_tokens, is_sorted=True, dtype=work.torch_dtype)
        ours, theirs = list[float](), list[float]()
        for number in range(-1, work.repeats):
            # The first update, of one group, makes the optimizers' state. It does not count.
            sequences = draw_training_sequences(work if number >= 0 else work._replace(groups=1), number + 1)
            ours.append(_measure_rate(trainer.run_rl_step, sequences))
            theirs.append(_measure_rate(padded.run_step, sequences))
    finally:
        leave_ranks(ranks)
    ours, theirs = ours[1:], theirs[1:]
    figures = {
        "tokens_per_s": median(ours),
        "transformers_tokens_per_s": median(theirs),
        "ratio": compute_median_ratio(ours, theirs),
    }
    print(f"training: {median(ours):.1f} tokens/s, transformers {median(theirs):.1f}", flush=True)
    return figures | ({} if limits is None else _compare(work, limits, figures["tokens_per_s"]))


def _measure_rate(run_step: Callable[[Sequence[TrainingSequence]], object], sequences: list[TrainingSequence]) -> float:
    began = time.perf_counter()
    run_step(sequences)
    return sum(each.num_tokens for each in sequences) / (time.perf_counter() - began)


def _compare(work: RealWorkload, limits: MachineLimits, tokens_per_s: float) -> dict[str, float]:
    sequences = draw_training_sequences(work, 1)
    scored = sum(each.num_loss_tokens for each in sequences)
    limit = limits.compute_training_rate([each.num_tokens for each in sequences], scored)
    return {"limit_tokens_per_s": limit, "share_of_limit": tokens_per_s / limit}
