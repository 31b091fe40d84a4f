"""Measures training: the rate of a matrix product, full steps, a large model's passes, and the output matrix."""

import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import torch

from asterism.analysis.planning.activation_memory import compute_activation_memory
from asterism.analysis.planning.learner_memory import RankMemory, RankShare, compute_rank_memory
from asterism.analysis.planning.model_size import measure_model
from asterism.configs.schema.algorithm import RlConfig
from asterism.configs.schema.learner_config import Checkpointing, LearnerConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import replace_keys
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.learner.batches.load_metrics import GIB, measure_peak_memory, reset_peak_memory
from asterism.engine.learner.batches.packing import split_micro_batches
from asterism.engine.learner.batches.training_sequence import TrainingSequence, build_training_sequence
from asterism.engine.learner.distributed import RankGroup, join_ranks
from asterism.engine.learner.sharding import shard_model
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.compiled_parts import compile_head_kernels
from asterism.engine.model.training_flops import count_forward_flops
from asterism.policies.losses.token_scores import EAGER_KERNELS, ScoredTokens, compute_token_scores
from benchmarks.support.engine_rate import fill_randomly

_MICRO_BATCHES = 2
_LENGTHS = ((50, 300), (300, 1500), (1500, 4000))  # ranges of lengths in tokens
_LENGTH_SHARES = (0.4, 0.45, 0.15)  # shares of the sequences with a length in each range
_FILL = 0.97  # filled share of a micro batch; unequal lengths do not fill micro batches exactly
_STEPS = 3
_USABLE_SHARE = 0.93  # usable share of the GPU's memory; the CUDA context and fragments of the allocator take the rest
_HEAD_WIDTH, _HEAD_VOCABULARY = 2048, 151_936


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Measure the shortest round. An uncounted first round compiles; the peak of memory is reset after it."""
    work()
    reset_peak_memory(device)
    taken: list[float] = []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken)


def measure_gemm(device: torch.device, size: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Measure the FLOP/s of a product of two square matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / measure_seconds(lambda: a @ b, device, rounds=10)


def make_trainer(config: DecoderConfig, ranks: RankGroup, learner: LearnerConfig) -> Trainer:
    """Make a trainer with random weights, created on the device."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = CausalLM(config)
    shard_model(model, ranks, learner.dtype)
    model.to_empty(device=ranks.device)
    fill_randomly(model)
    return Trainer(model, RunConfig(name="benchmark", rl=RlConfig(steps=1000), learner=learner), ranks)


def draw_lengths(tokens: int, micro_batches: int) -> list[int]:
    """Draw seeded lengths of sequences that fill 97% of the micro batches: many short and few long sequences.

    Lengths are 50 to 4,000 tokens for micro batches of 8,192 tokens or more, and proportionally shorter below.
    """
    draws, scale = np.random.default_rng(0), min(1.0, tokens / 8192)
    lengths: list[int] = []
    for _ in range(micro_batches):
        room = int(tokens * _FILL)
        while room:
            low, high = _LENGTHS[draws.choice(len(_LENGTHS), p=_LENGTH_SHARES)]
            length = max(2, int(scale * draws.integers(low, high + 1)))
            lengths.append(min(length, room))
            room -= lengths[-1]
    return lengths


def make_sequences(
    lengths: Sequence[int], vocabulary: int, groups: int | None = None, *, prompt_tokens: int = 1
) -> list[TrainingSequence]:
    """Make a sequence of length + 1 tokens for each length. All tokens after the prompt are in the loss.

    The sequences are assigned to `groups` in turn; without `groups`, each sequence has its own group. With more than
    one token, the prompts of a group are equal.
    """
    draws = np.random.default_rng(0)
    sequences: list[TrainingSequence] = []
    for number, length in enumerate(lengths):
        ids = draws.integers(0, vocabulary, length + 1, dtype=np.int32)
        logprobs = np.full(length + 1, -np.log(vocabulary), np.float32)
        mask, group = np.arange(length + 1) >= prompt_tokens, number % (groups or len(lengths))
        if prompt_tokens > 1:
            ids[:prompt_tokens] = np.random.default_rng(group).integers(0, vocabulary, prompt_tokens)
        sequences.append(build_training_sequence(ids, mask, logprobs, float(draws.normal()), group, number))
    return sequences


def plan_rank(config: DecoderConfig, learner: LearnerConfig) -> RankMemory:
    """Plan the memory of a single rank in bfloat16."""
    mode, on_gpu = learner.memory.activation_checkpointing, learner.device == "cuda"
    activations = compute_activation_memory(
        config, learner.memory.micro_batch_tokens, 2, mode, has_packed_kernel=on_gpu, is_compiled=learner.compiles
    )
    return compute_rank_memory(measure_model(config), RankShare(value_bytes=2, keeps_casts=mode == "none"), activations)


def choose_mode(config: DecoderConfig, learner: LearnerConfig, gpu_bytes: float) -> LearnerConfig:
    """Choose the first mode of activation checkpointing that fits the GPU, as `asterism plan` does."""
    usable = _USABLE_SHARE * gpu_bytes
    for mode in get_args(Checkpointing):
        chosen = replace_keys(learner, {"memory.activation_checkpointing": mode})
        if plan_rank(config, chosen).total < usable:
            return chosen
    tokens = learner.memory.micro_batch_tokens
    raise SystemExit(f"{tokens} tokens do not fit into {usable / GIB:.0f} GiB even with full checkpointing")


def measure_step(
    config: DecoderConfig,
    tokens: int,
    device: torch.device,
    gemm_size: int,
    *,
    sequences_per_micro_batch: int = 0,
    **changes: Any,
) -> dict[str, float | str]:
    """Measure a GRPO step in bfloat16: two micro batches of up to `tokens` packed tokens, and the update.

    A positive `sequences_per_micro_batch` makes sequences of equal lengths. `changes` are settings of the learner.
    """
    learner = make_learner(device, tokens, **changes)
    if device.type == "cuda" and "activation_checkpointing" not in changes:
        learner = choose_mode(config, learner, torch.cuda.get_device_properties(device).total_memory)
    planned = plan_rank(config, learner)
    trainer = make_trainer(config, join_ranks(learner), learner)
    equal = [tokens // max(1, sequences_per_micro_batch)] * (sequences_per_micro_batch * _MICRO_BATCHES)
    lengths = equal or draw_lengths(tokens, _MICRO_BATCHES)
    sequences = make_sequences(lengths, config.vocab_size)
    step_s = measure_seconds(lambda: trainer.run_rl_step(sequences), device, _STEPS)
    peak_gib = measure_peak_memory(device)["peak_memory_gib"]
    rate = trainer.flops.count_training(lengths, sum(lengths)) / step_s
    gemm = measure_gemm(device, gemm_size)
    return {
        "step_s": step_s,
        "tokens_per_s": sum(lengths) / step_s,
        "sequences": float(len(lengths)),
        "micro_batches": float(len(split_micro_batches(sequences, 1, tokens, trainer.flops.attention_tokens)[0])),
        "tflops": rate / 1e12,
        "gemm_tflops": gemm / 1e12,
        "share_of_gemm": rate / gemm,
        "peak_gib": peak_gib,
        "peak_over_plan": peak_gib * GIB / planned.total,
        "checkpointing": learner.memory.activation_checkpointing,
        "compile": str(learner.compiles),
    }


def make_learner(device: torch.device, tokens: int, **changes: Any) -> LearnerConfig:
    """Make default settings, but with one update per step and the rollout's log probabilities as the old ones."""
    settings: dict[str, Any] = {
        "device": "cuda" if device.type == "cuda" else "cpu",
        "dtype": "bfloat16",
        "memory.micro_batch_tokens": tokens,
        "loss.old_logprobs": "engine",
        "loss.correction": "none",
        "loss.mismatch_limit": 0.0,
    }
    return replace_keys(LearnerConfig(), settings | changes)


def measure_passes(config: DecoderConfig, tokens: int, device: torch.device, gemm_size: int) -> dict[str, float | str]:
    """Measure forward and backward without an optimizer, with weights and gradients in bfloat16."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = CausalLM(config)
    model.to(torch.bfloat16).to_empty(device=device)
    fill_randomly(model)
    model.set_recomputed("full")
    model.set_compiled(device.type == "cuda")
    ids = torch.randint(config.vocab_size, (1, tokens), device=device)
    scored = ScoredTokens(torch.arange(tokens - 1, device=device), ids[0, 1:])

    def run() -> None:
        model(ids, tokens=scored).logprobs_N.sum().backward()
        model.zero_grad()

    passes_s = measure_seconds(run, device, _STEPS)
    rate = count_forward_flops(config).count_training([tokens], tokens - 1) / passes_s
    gemm = measure_gemm(device, gemm_size)
    return {"passes_s": passes_s, "share_of_gemm": rate / gemm, **measure_peak_memory(device)}


def measure_head(tokens: int, device: torch.device, *, vocabulary: int = _HEAD_VOCABULARY) -> dict[str, float | str]:
    """Measure log probabilities and their gradients. The memory excludes the inputs and the output matrix."""
    hidden = torch.randn(tokens, _HEAD_WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, _HEAD_WIDTH, device=device)).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    kernels = compile_head_kernels() if device.type == "cuda" else EAGER_KERNELS

    def run() -> None:
        compute_token_scores(hidden, weight, targets, kernels=kernels).logprobs_N.sum().backward()
        hidden.grad = weight.grad = None

    reset_peak_memory(device)
    before = measure_peak_memory(device)["peak_memory_gib"]
    seconds = measure_seconds(run, device, 1)
    return {"head_s": seconds, "head_gib": measure_peak_memory(device)["peak_memory_gib"] - before}
