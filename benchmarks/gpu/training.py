"""Training on one device: the rate of a matrix product, full steps, a large model's passes, and the output matrix."""

import time
from collections.abc import Callable

import numpy as np
import torch

from analysis.planning.activation_memory import Checkpointing, compute_activation_memory
from analysis.planning.learner_memory import RankMemory, RankShare, compute_rank_memory
from analysis.planning.model_size import measure_model
from benchmarks.support.engine_rate import fill_randomly
from configs.algorithm import LearnerConfig, RlConfig
from configs.schema import RunConfig
from engine.learner.batches.training_sequence import TrainingSequence, build_training_sequence
from engine.learner.distributed import RankGroup, join_ranks
from engine.learner.micro_batches.load_metrics import GIB, measure_peak_memory, reset_peak_memory
from engine.learner.sharding import shard_model
from engine.learner.trainer import Trainer
from engine.model.causal_lm import CausalLM
from engine.model.model_config import DecoderConfig
from engine.model.training_flops import count_forward_flops
from policies.losses.token_scores import ScoredTokens, compute_token_scores

_SEQUENCES = 4  # of a micro batch
_MICRO_BATCHES = 2
_STEPS = 3
_USABLE_SHARE = 0.93  # of the GPU's memory; the rest has the CUDA context and fragments of the allocator
_MODES: tuple[Checkpointing, ...] = ("none", "selective", "full")
_HEAD_WIDTH, _HEAD_VOCABULARY = 2048, 151_936


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The shortest of the rounds, after a first one, which does not count."""
    taken: list[float] = []
    for _ in range(rounds + 1):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def measure_gemm(device: torch.device, size: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP/s of a product of two square matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / measure_seconds(lambda: a @ b, device, rounds=10)


def make_trainer(config: DecoderConfig, ranks: RankGroup, learner: LearnerConfig) -> Trainer:
    """With random weights, created on the device."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = CausalLM(config)
    shard_model(model, ranks, learner.dtype)
    model.to_empty(device=ranks.device)
    fill_randomly(model)
    return Trainer(model, RunConfig(name="benchmark", rl=RlConfig(steps=1000), learner=learner), ranks)


def make_sequences(count: int, tokens: int, vocabulary: int) -> list[TrainingSequence]:
    """Each with `tokens` tokens besides the first one, all in the loss."""
    draws, mask = np.random.default_rng(0), np.arange(tokens + 1) > 0
    logprobs = np.full(tokens + 1, -np.log(vocabulary), np.float32)
    ids = draws.integers(0, vocabulary, (count, tokens + 1), dtype=np.int32)
    return [build_training_sequence(row, mask, logprobs, float(draws.normal()), n, n) for n, row in enumerate(ids)]


def plan_rank(config: DecoderConfig, tokens: int, mode: Checkpointing, *, on_gpu: bool) -> RankMemory:
    activations = compute_activation_memory(config, tokens, 2, mode, has_packed_kernel=on_gpu)
    return compute_rank_memory(measure_model(config), RankShare(value_bytes=2, has_units=True), activations)


def choose_mode(config: DecoderConfig, tokens: int, device: torch.device) -> tuple[Checkpointing, RankMemory]:
    """The first mode that fits the GPU, as `asterism plan` would choose."""
    if device.type == "cpu":
        return "none", plan_rank(config, tokens, "none", on_gpu=False)
    usable = _USABLE_SHARE * torch.cuda.get_device_properties(device).total_memory
    for mode in _MODES:
        planned = plan_rank(config, tokens, mode, on_gpu=True)
        if planned.total < usable:
            return mode, planned
    raise SystemExit(f"{tokens} tokens do not fit into {usable / GIB:.0f} GiB even with full checkpointing")


def measure_step(config: DecoderConfig, tokens: int, device: torch.device, gemm_size: int) -> dict[str, float | str]:
    """A GRPO step in bfloat16: two micro batches of `tokens` packed tokens, and the update."""
    mode, planned = choose_mode(config, tokens, device)
    learner = LearnerConfig(
        device="cuda" if device.type == "cuda" else "cpu",
        dtype="bfloat16",
        micro_batch_tokens=tokens,
        minibatches=1,
        activation_checkpointing=mode,
        old_logprobs="engine",
        correction="none",
        mismatch_limit=0.0,
    )
    trainer = make_trainer(config, join_ranks(learner), learner)
    sequences = make_sequences(_MICRO_BATCHES * _SEQUENCES, tokens // _SEQUENCES, config.vocab_size)
    reset_peak_memory(device)
    step_s = measure_seconds(lambda: trainer.run_rl_step(sequences), device, _STEPS)
    peak_gib = measure_peak_memory(device)["peak_memory_gib"]
    lengths = [each.num_tokens - 1 for each in sequences]
    rate = trainer.flops.count_training(lengths, sum(lengths)) / step_s
    gemm = measure_gemm(device, gemm_size)
    return {
        "step_s": step_s,
        "tokens_per_s": sum(lengths) / step_s,
        "tflops": rate / 1e12,
        "gemm_tflops": gemm / 1e12,
        "share_of_gemm": rate / gemm,
        "peak_gib": peak_gib,
        "peak_over_plan": peak_gib * GIB / planned.total,
        "checkpointing": mode,
    }


def measure_passes(config: DecoderConfig, tokens: int, device: torch.device, gemm_size: int) -> dict[str, float | str]:
    """Forward and backward without an optimizer, with weights and gradients in bfloat16."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = CausalLM(config)
    model.to(torch.bfloat16).to_empty(device=device)
    fill_randomly(model)
    model.set_recomputed("full")
    ids = torch.randint(config.vocab_size, (1, tokens), device=device)
    scored = ScoredTokens(torch.arange(tokens - 1, device=device), ids[0, 1:])

    def run() -> None:
        model(ids, tokens=scored).logprobs_N.sum().backward()
        model.zero_grad()

    reset_peak_memory(device)
    passes_s = measure_seconds(run, device, _STEPS)
    rate = count_forward_flops(config).count_training([tokens], tokens - 1) / passes_s
    gemm = measure_gemm(device, gemm_size)
    return {"passes_s": passes_s, "share_of_gemm": rate / gemm, **measure_peak_memory(device)}


def measure_head(tokens: int, device: torch.device, *, vocabulary: int = _HEAD_VOCABULARY) -> dict[str, float | str]:
    """Log probabilities of `tokens` tokens and their gradients; memory besides the inputs and the output matrix."""
    hidden = torch.randn(tokens, _HEAD_WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, _HEAD_WIDTH, device=device)).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)

    def run() -> None:
        compute_token_scores(hidden, weight, targets).logprobs_N.sum().backward()
        hidden.grad = weight.grad = None

    reset_peak_memory(device)
    before = measure_peak_memory(device)["peak_memory_gib"]
    seconds = measure_seconds(run, device, 1)
    return {"head_s": seconds, "head_gib": measure_peak_memory(device)["peak_memory_gib"] - before}
