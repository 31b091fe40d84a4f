"""Measure the learner's speed on one core, and its plan of micro batches. Prints a JSON line last.

    python -m benchmarks.learner [--rounds 12] [--quick] [--model FOLDER [--threads 2]]

The model of the demo (0.45M parameters) trains on 128 sequences of 18 to 175 tokens per update, in micro batches of at
most 1,536 tokens, with learner.compile = true and false; transformers trains on the same sequences, without torch.compile.
A model with 17M parameters trains in float32 and bfloat16. All variants take turns within each round. Keys:

    tokens_per_s             tokens per CPU second of the learner with compiled layers
    ratio_padded             tokens per CPU second, over those of transformers with one padded batch per update
    ratio_padded_small       the same, with padded micro batches of at most 1,536 tokens, in the given order
    ratio_sorted             the same, with micro batches of sequences sorted by length
    tokens_per_s_eager       tokens per CPU second of the learner without compilation
    ratio_sorted_eager       the same as ratio_sorted, without compilation
    compile_s                CPU seconds of the first update with compiled layers, and of the compilers; low if torch's
                             cache (TORCHINDUCTOR_CACHE_DIR) has the code
    bf16_ratio_17m           bfloat16 over float32, without compilation
    ratio_shared_17m         tokens per CPU second with shared prompts, over those without; in float32, groups of eight
                             sequences, the prompt is half of a sequence

Times are CPU seconds of the process; a ratio is the median over the rounds. Micro batches of 16,384 tokens are planned for
4,096 sequences of up to 14,336 tokens on 64 ranks, for the sizes of a model with 14B parameters. Keys:

    fill                              filled share of all micro batches; the mean of eight random steps
    lockstep_loss_4096_rows_64_ranks  share of time in which ranks wait for the slowest one of each round
    plan_s                            CPU seconds to plan one step

With --model, the program measures only a model of that folder's shape, with random weights, in float32. Three models with
their optimizers are in memory at once: about 8 GB for 135M parameters. Each update has
two groups of eight sequences, with prompts of 128 tokens and responses of 90 to 166 tokens. Keys:

    model_tokens_per_s       tokens of whole sequences per CPU second, with shared prompts
    model_ratio_shared       the same, over the learner without shared prompts
    model_ratio_sorted       the same, over transformers with equal micro batches of sequences sorted by length
    model_ratio_unshared     the learner without shared prompts, over transformers
    model_tokens_per_wall_s  tokens of whole sequences per second, with shared prompts
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asterism.configs.schema.algorithm import RlConfig
from asterism.configs.schema.learner_config import LearnerConfig, LossConfig, MemoryConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.hf.model_config import DecoderConfig, load_model_config
from asterism.engine.learner.batches.packing import split_micro_batches
from asterism.engine.learner.batches.training_sequence import TrainingSequence, build_training_sequence
from asterism.engine.learner.distributed import RankGroup, join_ranks, leave_ranks
from asterism.engine.learner.sharding import shard_model
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.causal_lm import CausalLM, initialize_weights
from asterism.engine.model.training_flops import count_forward_flops
from asterism.tasks.tiny.prepare import TinyDemo
from benchmarks.support.benchmark_main import Flag, Options, benchmark_main, compute_median_ratio
from benchmarks.support.qwen3_models import read_qwen3
from benchmarks.support.transformers_training import PaddedTraining

VOCABULARY = 450
MICRO_BATCH_TOKENS = 1536
PROMPT_TOKENS, GROUP_SIZE = 128, 8  # sizes of the groups with shared prompts
UNLIMITED_TOKENS = 1 << 30
LONG_MICRO_BATCH_TOKENS = 16_384
RANKS, ROWS = 64, 4096
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 7000, 0.5, 14_336
SHAPE_17M = DecoderConfig(
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=5,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    tie_word_embeddings=True,
)

RunStep = Callable[[Sequence[TrainingSequence]], object]


def make_sequences(count: int, vocabulary: int, seed: int) -> list[TrainingSequence]:
    """Make sequences with a prompt of 10 tokens; 7 of 10 later tokens are in the loss."""
    draws = np.random.default_rng(seed)
    sequences: list[TrainingSequence] = []
    for number, length in enumerate(draws.integers(18, 176, count)):
        mask = draws.random(length) < 0.7
        mask[:10], mask[-1] = False, True
        token_ids = draws.integers(0, vocabulary, length, dtype=np.int32)
        logprobs = np.full(length, -np.log(vocabulary), np.float32)
        sequences.append(
            build_training_sequence(token_ids, mask, logprobs, float(draws.normal()), number // 16, number)
        )
    return sequences


def make_siblings(groups: int, vocabulary: int, seed: int) -> list[TrainingSequence]:
    """Make groups with a common prompt. Responses have as many tokens as the prompt on average; all are in the loss."""
    draws = np.random.default_rng(seed)
    sequences: list[TrainingSequence] = []
    for group in range(groups):
        prompt = draws.integers(0, vocabulary, PROMPT_TOKENS, dtype=np.int32)
        for number, length in enumerate(draws.integers(PROMPT_TOKENS * 7 // 10, PROMPT_TOKENS * 13 // 10, GROUP_SIZE)):
            token_ids = np.concatenate((prompt, draws.integers(0, vocabulary, length, dtype=np.int32)))
            logprobs = np.full(len(token_ids), -np.log(vocabulary), np.float32)
            mask, advantage = np.arange(len(token_ids)) >= PROMPT_TOKENS, float(draws.normal())
            sequences.append(build_training_sequence(token_ids, mask, logprobs, advantage, group, number))
    return sequences


def make_trainer(config: DecoderConfig, ranks: RankGroup, *, shared_prompts: bool = True, **settings: Any) -> Trainer:
    learner = LearnerConfig(
        memory=MemoryConfig(micro_batch_tokens=MICRO_BATCH_TOKENS, shared_prompts=shared_prompts),
        loss=LossConfig(old_logprobs="engine", correction="none", mismatch_limit=0.0),
        **settings,
    )
    model = CausalLM(config)
    initialize_weights(model, 0)
    shard_model(model, ranks, learner.dtype)
    return Trainer(model, RunConfig(name="benchmark", rl=RlConfig(steps=1_000_000), learner=learner), ranks)


def measure_speeds(
    variants: Mapping[str, RunStep],
    rounds: int,
    count: int,
    vocabulary: int,
    make: Callable[[int, int, int], list[TrainingSequence]] = make_sequences,
) -> dict[str, list[float]]:
    """Measure the tokens per CPU second of each variant by round. The first round is not counted.

    `make` makes the sequences of a round from `count`, the vocabulary and a seed.
    """
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        sequences = make(count, vocabulary, number)
        tokens = sum(each.num_tokens for each in sequences)
        for name, run_step in variants.items():
            began = time.process_time()
            run_step(sequences)
            if number:
                speeds[name].append(tokens / (time.process_time() - began))
    return speeds


def compute_ratio(speeds: Mapping[str, list[float]], name: str, other: str) -> float:
    return round(compute_median_ratio(speeds[name], speeds[other]), 3)


def measure_demo(rounds: int, count: int) -> dict[str, float]:
    config = TinyDemo().build_model_config(VOCABULARY)
    compiled = make_trainer(config, RankGroup(), compile=True)
    began = sum_cpu_seconds()
    compiled.run_rl_step(make_sequences(count, VOCABULARY, 0))
    compile_s = sum_cpu_seconds() - began
    variants: dict[str, RunStep] = {
        "learner": compiled.run_rl_step,
        "eager": make_trainer(config, RankGroup()).run_rl_step,
        "padded": PaddedTraining(config, UNLIMITED_TOKENS, is_sorted=False).run_step,
        "padded_small": PaddedTraining(config, MICRO_BATCH_TOKENS, is_sorted=False).run_step,
        "sorted": PaddedTraining(config, MICRO_BATCH_TOKENS, is_sorted=True).run_step,
    }
    speeds = measure_speeds(variants, rounds, count, VOCABULARY)
    return {
        "tokens_per_s": round(statistics.median(speeds["learner"])),
        "ratio_padded": compute_ratio(speeds, "learner", "padded"),
        "ratio_padded_small": compute_ratio(speeds, "learner", "padded_small"),
        "ratio_sorted": compute_ratio(speeds, "learner", "sorted"),
        "tokens_per_s_eager": round(statistics.median(speeds["eager"])),
        "ratio_sorted_eager": compute_ratio(speeds, "eager", "sorted"),
        "compile_s": round(compile_s, 1),
    }


def sum_cpu_seconds() -> float:
    """Sum the CPU seconds of this process and of its child processes that have ended."""
    return sum(os.times()[:4])


def measure_bfloat16(ranks: RankGroup, rounds: int, count: int) -> dict[str, float]:
    variants: dict[str, RunStep] = {
        "float32": make_trainer(SHAPE_17M, RankGroup()).run_rl_step,
        "bfloat16": make_trainer(SHAPE_17M, ranks, dtype="bfloat16").run_rl_step,
    }
    speeds = measure_speeds(variants, rounds, count, SHAPE_17M.vocab_size)
    return {"bf16_ratio_17m": compute_ratio(speeds, "bfloat16", "float32")}


def make_shared_variants(config: DecoderConfig) -> dict[str, RunStep]:
    return {
        "shared": make_trainer(config, RankGroup()).run_rl_step,
        "unshared": make_trainer(config, RankGroup(), shared_prompts=False).run_rl_step,
    }


def measure_shared_prompts(rounds: int) -> dict[str, float]:
    speeds = measure_speeds(make_shared_variants(SHAPE_17M), rounds, 2, SHAPE_17M.vocab_size, make_siblings)
    return {"ratio_shared_17m": compute_ratio(speeds, "shared", "unshared")}


def measure_model(folder: Path, rounds: int, groups: int) -> dict[str, float]:
    """Measure a model of the folder's shape."""
    config = load_model_config(folder)
    variants = make_shared_variants(config)
    variants["sorted"] = PaddedTraining(config, MICRO_BATCH_TOKENS, is_sorted=True).run_step
    wall_s = list[float]()

    def run_shared(sequences: Sequence[TrainingSequence], run_step: RunStep = variants["shared"]) -> None:
        began = time.perf_counter()
        run_step(sequences)
        wall_s.append((time.perf_counter() - began) / sum(each.num_tokens for each in sequences))

    speeds = measure_speeds(variants | {"shared": run_shared}, rounds, groups, config.vocab_size, make_siblings)
    return {
        "model_tokens_per_s": round(statistics.median(speeds["shared"]), 1),
        "model_ratio_shared": compute_ratio(speeds, "shared", "unshared"),
        "model_ratio_sorted": compute_ratio(speeds, "shared", "sorted"),
        "model_ratio_unshared": compute_ratio(speeds, "unshared", "sorted"),
        "model_tokens_per_wall_s": round(1 / statistics.median(wall_s[1:]), 1),
    }


def plan_micro_batches(seeds: int) -> dict[str, float]:
    """Plan the micro batches of random steps."""
    attention_tokens = count_forward_flops(read_qwen3("14B")).attention_tokens
    fills: list[float] = []
    losses: list[float] = []
    began = time.process_time()
    for seed in range(seeds):
        draws = np.random.default_rng(seed)
        lengths = np.minimum(MEDIAN_TOKENS * np.exp(SIGMA * draws.standard_normal(ROWS)), MOST_TOKENS).astype(int)
        sequences = [make_row(length) for length in lengths.tolist()]
        shares = split_micro_batches(sequences, RANKS, LONG_MICRO_BATCH_TOKENS, attention_tokens)
        fills.append(float(sum(lengths - 1)) / (RANKS * len(shares[0]) * LONG_MICRO_BATCH_TOKENS))
        costs_RM = np.array([[sum_costs(lengths[each] - 1, attention_tokens) for each in share] for share in shares])
        losses.append(float(1 - costs_RM.mean(0).sum() / costs_RM.max(0).sum()))
    return {
        "fill": round(statistics.mean(fills), 4),
        f"lockstep_loss_{ROWS}_rows_{RANKS}_ranks": round(statistics.mean(losses), 4),
        "plan_s": round((time.process_time() - began) / seeds, 3),
    }


def make_row(length: int) -> TrainingSequence:
    in_loss = np.arange(length) > 0
    return TrainingSequence(np.zeros(length, np.int32), in_loss, np.zeros(length, np.float32), advantage=1.0)


def sum_costs(lengths: np.ndarray, attention_tokens: float) -> float:
    return float((lengths * (1 + lengths / attention_tokens)).sum())


def measure(options: Options) -> dict[str, float]:
    rounds = options.rounds
    count, seeds = (16, 1) if options.quick else (128, 8)
    torch.set_num_threads(options.threads)
    if options.model is not None:
        return measure_model(options.model, rounds, 1 if options.quick else 2)
    ranks = join_ranks(LearnerConfig(dtype="bfloat16"))
    try:
        figures = measure_demo(rounds, count) | measure_bfloat16(ranks, rounds, count)
        return figures | measure_shared_prompts(rounds) | plan_micro_batches(seeds)
    finally:
        leave_ranks(ranks)


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        Flag("--rounds", 12, "rounds of each comparison", quick=1),
        Flag("--model", None, "transformers folder of a model to measure instead", kind=Path, metavar="FOLDER"),
        Flag("--threads", 1, "CPU threads"),
        quick="one round with few sequences",
    )
