"""The cost of new weights on one machine: the learner writes a slot, an embedded engine loads it."""

import shutil
import time
from pathlib import Path

import torch
from msgspec.structs import replace

from engine.inference.fused_weights import FusedWeights
from engine.learner.weight_publisher import WeightPublisher
from engine.model.causal_lm import CausalLM
from engine.model.model_config import DecoderConfig
from engine.weight_transfer.shared_memory import load_published

FULL = DecoderConfig(
    vocab_size=40_000,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=8,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    tie_word_embeddings=False,
)
QUICK = replace(
    FULL, vocab_size=2000, hidden_size=256, intermediate_size=768, num_layers=2, num_heads=4, num_kv_heads=2
)


def measure_local_transfer(memory: Path, *, quick: bool, rounds: int) -> dict[str, float]:
    """CPU seconds per GB of the weights in float32, for engines in float32 and in bfloat16.

    The lowest of the rounds, after a first one, which allocates the slot.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CausalLM(QUICK if quick else FULL)
    gb = 4 * sum(parameter.numel() for parameter in model.parameters()) / 1e9
    figures: dict[str, float] = {"model_mb": 1000 * gb}
    for dtype in (torch.float32, torch.bfloat16):
        publish_s, load_s = _measure(memory / "local", model, dtype, rounds)
        name = str(dtype).removeprefix("torch.")
        figures[f"publish_cpu_s_per_gb_{name}"] = publish_s / gb
        figures[f"load_cpu_s_per_gb_{name}"] = load_s / gb
    return figures


def _measure(memory: Path, model: CausalLM, dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    publisher = WeightPublisher(memory, dict(model.named_parameters()), dtype, 1)
    engine = FusedWeights(model.to(dtype), torch.device("cpu"))
    model.to(torch.float32)
    taken: list[tuple[float, float]] = []
    for version in range(rounds + 1):
        began = time.process_time()
        published = publisher.publish(version)
        written = time.process_time()
        assert published is not None
        load_published(published, engine.parameters, dtype)
        engine.update_derived()
        taken.append((written - began, time.process_time() - written))
    publisher.close()
    shutil.rmtree(memory)
    return min(publish_s for publish_s, _ in taken[1:]), min(load_s for _, load_s in taken[1:])
