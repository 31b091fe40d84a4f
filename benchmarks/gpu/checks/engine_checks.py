"""Checks the engine: graphs against eager steps, chunked against whole prefill, and the bits of published weights."""

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.configs.schema.algorithm import GREEDY
from asterism.engine.contract import Capacity, Generation, GenerationRequest
from asterism.engine.inference.embedded import EmbeddedEngine
from asterism.engine.inference.fused_weights import FusedWeights
from asterism.engine.learner.weight_publisher import WeightPublisher
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.weight_transfer.shared_memory import load_published
from benchmarks.gpu.checks.measured import Measured, count_differing
from benchmarks.gpu.checks.model_checks import VOCABULARY, build_small_config, build_small_model, write_small_checkpoint
from benchmarks.gpu.weight_engine import make_sharing, running_engine

_MEMORY = Path("/dev/shm")
_PROMPT_LENGTHS = (5, 200, 17, 64, 131)
_NEW_TOKENS = 40
_LOGPROB_LIMIT = 1e-4  # limit of a difference in float32; CPU kernels do not depend on the batch, so there it is 0


def check_graphs(device: torch.device) -> Iterator[Measured]:
    """Compare greedy tokens in float32 with and without graphs. On a CPU neither engine has graphs."""
    return _compare(_generate(device, cuda_graphs=True), _generate(device, cuda_graphs=False))


def check_prefill(device: torch.device) -> Iterator[Measured]:
    """Compare greedy tokens after a prefill in chunks of 16 tokens with greedy tokens after a whole prefill."""
    return _compare(_generate(device, prefill_tokens=16), _generate(device, prefill_tokens=1024))


def _compare(found: list[Generation], expected: list[Generation]) -> Iterator[Measured]:
    pairs = list(zip(found, expected, strict=True))
    differing = sum(int((a.token_ids != b.token_ids).sum()) for a, b in pairs)
    yield Measured("differing tokens", float(differing), 0.0)
    worst = max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in pairs)
    yield Measured("log probabilities", worst, _LOGPROB_LIMIT)


def _generate(device: torch.device, **options: Any) -> list[Generation]:
    """Generate with the small model, for the same prompts in each call."""
    with tempfile.TemporaryDirectory() as name:
        write_small_checkpoint(Path(name))
        return asyncio.run(_run_engine(Path(name), device, options))


async def _run_engine(folder: Path, device: torch.device, options: dict[str, Any]) -> list[Generation]:
    capacity = Capacity(kv_tokens=2048, page_tokens=16, sequence_tokens=256)
    engine = EmbeddedEngine(folder, capacity, device=device, **options)
    await engine.start()
    try:
        requests = [
            GenerationRequest(number, prompt, _NEW_TOKENS, GREEDY) for number, prompt in enumerate(_draw_prompts())
        ]
        return list(await asyncio.gather(*map(engine.generate, requests)))
    finally:
        await engine.close()


def _draw_prompts() -> list[NDArray[np.int32]]:
    draws = np.random.default_rng(0)
    return [draws.integers(0, VOCABULARY, length, dtype=np.int32) for length in _PROMPT_LENGTHS]


def check_published_weights(device: torch.device) -> Iterator[Measured]:
    """Compare float32 weights of a learner with bfloat16 weights of an engine on the same device, for two versions."""
    config = build_small_config()
    model = build_small_model(config).to(device)
    engine = FusedWeights(build_small_model(config).to(torch.bfloat16), device)
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        publisher = WeightPublisher(Path(folder), dict(model.named_parameters()), torch.bfloat16, 2)
        for version in range(2):
            load_published(_publish_changed(publisher, model, version), engine.parameters, torch.bfloat16)
            engine.update_derived()
            yield _compare_bits(engine.parameters, model, version)
        publisher.close()


def check_shared_weights(device: torch.device) -> Iterator[Measured]:
    """Compare the weights of an engine in another process. It maps memory of the learner's GPU, or a file on a CPU."""
    config = build_small_config()
    model = build_small_model(config).to(device)
    with tempfile.TemporaryDirectory(dir=_MEMORY) as name, running_engine(config, device, Path(name)) as engine:
        sharing = make_sharing(device, Path(name))
        publisher = WeightPublisher(Path(name), dict(model.named_parameters()), torch.bfloat16, 2, sharing=sharing)
        for version in range(2):
            loaded = engine.load_shared(_publish_changed(publisher, model, version), returns_values=True)
            found = {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in loaded.values.items()}
            yield _compare_bits(found, model, version)
        publisher.close()


@torch.no_grad()
def _publish_changed(publisher: WeightPublisher, model: CausalLM, version: int) -> WeightsPublished:
    for parameter in model.parameters():
        parameter.mul_(1.01)
    published = publisher.publish(version)
    assert published is not None
    return published


def _compare_bits(found: Mapping[str, Tensor], model: CausalLM, version: int) -> Measured:
    expected = {name: each.to(torch.bfloat16) for name, each in model.named_parameters()}
    differing = count_differing([found[name] for name in expected], expected.values())
    return Measured(f"differing elements of version {version}", float(differing), 0.0)
