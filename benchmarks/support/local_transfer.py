"""Measures the cost of new weights on one machine: the learner writes a slot, and an embedded engine loads it."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from asterism.bus.messages import WeightsPublished
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.inference.fused_weights import FusedWeights
from asterism.engine.learner.adapters.adapted_model import initialize_adapters
from asterism.engine.learner.adapters.adapter_publisher import AdapterPublisher
from asterism.engine.learner.weight_publisher import WeightPublisher
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.lora_linear import add_adapters
from asterism.engine.model.lora_options import ATTENTION_TARGETS, MLP_TARGETS, LoraOptions
from asterism.engine.weight_transfer.published_loader import PublishedLoader

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

ADAPTERS = LoraOptions(16, 32.0, (*ATTENTION_TARGETS, *MLP_TARGETS))


def measure_local_transfer(memory: Path, *, quick: bool, rounds: int) -> dict[str, float]:
    """Measure the CPU seconds per GB of float32 weights, for engines in float32 and in bfloat16.

    The round with the lowest CPU time counts. The first round is not counted, because it allocates the slot.
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
        adapters_mb, publish_s, load_s = _measure_adapters(memory / "local", model.config, dtype, rounds)
        figures["adapters_mb"] = adapters_mb
        figures[f"adapters_publish_cpu_s_{name}"] = publish_s
        figures[f"adapters_load_cpu_s_per_gb_{name}"] = load_s / gb
    return figures


def _measure_adapters(
    memory: Path, config: DecoderConfig, dtype: torch.dtype, rounds: int
) -> tuple[float, float, float]:
    """Return the MB of the adapters, and the same seconds as `_measure`. The first round also publishes their base."""
    model = CausalLM(config)
    engine = FusedWeights(model.to(dtype), torch.device("cpu"))
    add_adapters(model.to(torch.float32), ADAPTERS)
    initialize_adapters(model, seed=0)
    publisher, loader = AdapterPublisher(memory, model, dtype), PublishedLoader(dtype, torch.device("cpu"), ADAPTERS)

    def load(published: WeightsPublished) -> None:
        loader.load(published, engine.parameters)
        engine.update_derived()

    publish_s, load_s = _take_lowest(publisher.publish, load, rounds)
    num_bytes = publisher.num_bytes
    publisher.close()
    shutil.rmtree(memory)
    return num_bytes / 1e6, publish_s, load_s


def _take_lowest(
    publish: Callable[[int], WeightsPublished | None], load: Callable[[WeightsPublished], None], rounds: int
) -> tuple[float, float]:
    """Return the lowest CPU seconds of publication and of load, without the first round."""
    taken: list[tuple[float, float]] = []
    for version in range(rounds + 1):
        began = time.process_time()
        published = publish(version)
        written = time.process_time()
        assert published is not None
        load(published)
        taken.append((written - began, time.process_time() - written))
    return min(publish_s for publish_s, _ in taken[1:]), min(load_s for _, load_s in taken[1:])


def _measure(memory: Path, model: CausalLM, dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    publisher = WeightPublisher(memory, dict(model.named_parameters()), dtype, 1)
    engine = FusedWeights(model.to(dtype), torch.device("cpu"))
    model.to(torch.float32)
    loader = PublishedLoader(dtype, torch.device("cpu"))

    def load(published: WeightsPublished) -> None:
        loader.load(published, engine.parameters)
        engine.update_derived()

    lowest = _take_lowest(publisher.publish, load, rounds)
    publisher.close()
    shutil.rmtree(memory)
    return lowest
