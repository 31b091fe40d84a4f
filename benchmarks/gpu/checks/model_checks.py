"""Checks logits and gradients of each architecture: float32 with the CPU, bfloat16 and compiled layers with float32."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from asterism.engine.hf.architectures import ARCHITECTURES
from asterism.engine.hf.model_config import DecoderConfig, ExpertsConfig
from asterism.engine.model.causal_lm import CausalLM, initialize_weights
from asterism.engine.model.packed_attention import build_segments
from asterism.policies.losses.token_scores import ScoredTokens, TokenScores
from benchmarks.gpu.checks.measured import (
    BFLOAT16_LIMIT,
    FLOAT32_LIMIT,
    Measured,
    compute_relative_error,
    compute_worst_error,
)
from benchmarks.support.engine_rate import write_model

VOCABULARY = 1000
_LENGTHS = (37, 1, 130, 64)  # lengths of packed sequences
_STD = 0.05  # standard deviation of weights: larger than for training, so that attention is not uniform


class Computed(NamedTuple):
    logits_TV: Tensor
    gradients: dict[str, Tensor]


def build_small_config(architecture: str = "qwen3", experts_per_token: int = 2) -> DecoderConfig:
    """Build a configuration of two layers. In an architecture with experts, the second layer has four experts."""
    experts = ExpertsConfig(
        num_experts=4, experts_per_token=experts_per_token, expert_size=128, normalizes_weights=True, dense_layers=(0,)
    )
    return DecoderConfig(
        model_type=architecture,
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        experts=experts if ARCHITECTURES[architecture].has_experts else None,
    )


def build_small_model(config: DecoderConfig) -> CausalLM:
    """Build a float32 model in main memory, with equal weights in each call. Biases are not 0, and norms are not 1."""
    model = CausalLM(config)
    initialize_weights(model, seed=0, std=_STD)
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=draws)
    return model


def write_small_checkpoint(folder: Path) -> None:
    """Write the small model without a tokenizer."""
    write_model(folder, build_small_model(build_small_config()))


def compute(
    config: DecoderConfig, device: torch.device, dtype: torch.dtype = torch.float32, *, is_compiled: bool = False
) -> Computed:
    """Score packed sequences with the same tokens in each call. Parameters and gradients are float32, as in the learner."""
    model = build_small_model(config).to(device)
    if dtype != torch.float32:
        model.set_compute_dtype(dtype)
    model.set_compiled(is_compiled)
    total = sum(_LENGTHS)
    draws = torch.Generator().manual_seed(1)
    ids_T, targets_T = torch.randint(VOCABULARY, (2, total), generator=draws).to(device)
    weights_T = torch.randn(total, generator=draws).to(device)
    segments = build_segments(_LENGTHS)
    segments = segments._replace(offsets=segments.offsets.to(device), positions_T=segments.positions_T.to(device))
    scores = model(ids_T[None], tokens=ScoredTokens(torch.arange(total, device=device), targets_T), segments=segments)
    assert isinstance(scores, TokenScores)
    (scores.logprobs_N * weights_T).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert {each.dtype for each in gradients.values()} == {torch.float32}
    with torch.no_grad():
        hidden_BTE = model(ids_T[None], segments=segments)
        assert isinstance(hidden_BTE, Tensor)
        return Computed(model.compute_logits(hidden_BTE[0]), gradients)


def compare(found: Computed, expected: Computed, limit: float) -> Iterator[Measured]:
    yield Measured("logits", compute_relative_error(found.logits_TV, expected.logits_TV), limit)
    assert found.gradients.keys() == expected.gradients.keys()
    yield Measured("gradients", compute_worst_error(found.gradients, expected.gradients), limit)


def check_float32(architecture: str, device: torch.device) -> Iterator[Measured]:
    """Compare float32 results with those of the CPU."""
    config = build_small_config(architecture)
    return compare(compute(config, device), compute(config, torch.device("cpu")), FLOAT32_LIMIT)


def check_bfloat16(architecture: str, device: torch.device) -> Iterator[Measured]:
    """Compare bfloat16 with float32 on the same device. A token uses all experts, because rounding changes routes."""
    config = build_small_config(architecture, experts_per_token=4)
    return compare(compute(config, device, torch.bfloat16), compute(config, device), BFLOAT16_LIMIT)


def check_compiled(device: torch.device) -> Iterator[Measured]:
    """Compare compiled with eager layers on the same device."""
    config = build_small_config()
    return compare(compute(config, device, is_compiled=True), compute(config, device), FLOAT32_LIMIT)
