"""Tests of each architecture in the embedded engine: batches, prompt chunks, new weights, graphs, strict mode."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from asterism.configs.schema.algorithm import GREEDY
from asterism.engine.contract import Capacity, GenerationRequest
from asterism.engine.hf.architectures import ARCHITECTURES
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.inference.embedded import EmbeddedEngine
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.inference.fused_weights import FusedWeights
from asterism.engine.inference.kernels.attention_kernels import FastCpuKernels
from asterism.engine.inference.kernels.batch_invariance import NotBatchInvariant
from asterism.engine.inference.kernels.matmul import PACKED
from asterism.engine.model import experts
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.inference.cores import (
    alone,
    assert_as_alone,
    assert_greedy,
    assert_logprobs,
    assert_same,
    draw_request,
    generate,
    new_core,
)
from tests.engine.inference.recorded_graph import Recorded
from tests.engine.model.transformers_reference import SCALINGS, scaled_architecture
from tests.engine.started_engines import started
from tests.engine.tiny_models import random_ids, save_small_model, small_architecture, small_model

REQUESTS = [draw_request(number, 3 + 9 * number, 12) for number in range(5)]
DENSE = [model_type for model_type, architecture in ARCHITECTURES.items() if not architecture.has_experts]


def assert_generates_as_trained(model: CausalLM, **options: Any) -> None:
    found = generate(EngineCore(model, Capacity(512, 8, 96), **options), *REQUESTS)
    for request in REQUESTS:
        assert_logprobs(model, request, found[request.sequence_id])


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_batches_and_chunks_give_the_logprobs_of_the_training_forward(model_type: str, rows: int) -> None:
    model = small_model(config=small_architecture(model_type))
    assert_generates_as_trained(model, prefill_tokens=7, max_running=rows)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_greedy_tokens_equal_the_training_forward(model_type: str, tied: bool) -> None:
    model = small_model(config=small_architecture(model_type, tie_word_embeddings=tied))
    request = GenerationRequest(1, random_ids(8, 0), 20, GREEDY)
    assert_greedy(model, request, generate(new_core(model), request)[1])


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_model_with_any_rope_scaling_is_decoded(scaling: str) -> None:
    assert_generates_as_trained(small_model(config=scaled_architecture("llama", scaling)), max_running=4)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", DENSE)
def test_a_dense_model_gives_a_token_the_same_bits_in_any_batch(model_type: str) -> None:
    model = small_model(config=small_architecture(model_type))
    assert_as_alone(model, generate(new_core(model, prefill_tokens=11), *REQUESTS), *REQUESTS)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_installed_weights_replace_all_weights(model_type: str) -> None:
    config = small_architecture(model_type, tie_word_embeddings=False)
    core, other = new_core(small_model(config=config)), small_model(seed=5, config=config)
    core.install_weights(1, other.state_dict())
    assert_same(generate(core, REQUESTS[2])[2], alone(other, REQUESTS[2]))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_the_kernels_of_a_fast_engine_give_the_logprobs_of_the_training_forward(
    model_type: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights are packed again."""
    monkeypatch.setattr("asterism.engine.inference.kernels.matmul.MIN_PACKED_SIZE", 1)
    config = small_architecture(model_type, tie_word_embeddings=tied)
    model, other = small_model(config=config), small_model(seed=5, config=config)
    fast = {"matmul": PACKED, "attention_kernels": FastCpuKernels()}
    assert_generates_as_trained(model, prefill_tokens=30, **fast)
    core = new_core(model, **fast)
    core.install_weights(1, other.state_dict())
    assert_logprobs(other, REQUESTS[2], generate(core, REQUESTS[2])[2])


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_fused_weights_are_accessible_by_checkpoint_name(model_type: str) -> None:
    model = small_model(config=small_architecture(model_type))
    weights = FusedWeights(model, torch.device("cpu"))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.parameters.items()}
    assert shapes == model.config.compute_weight_shapes()
    for name, parameter in model.named_parameters():
        assert torch.equal(weights.parameters[name], parameter)


@pytest.mark.slow
def test_graphs_decode_experts_with_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def always(device: torch.device, dtype: torch.dtype, sizes: Collection[int]) -> bool:
        return True

    monkeypatch.setattr(experts, "supports_grouped_mm", always)
    capture = Recorded()
    assert_generates_as_trained(small_model(config=small_architecture("qwen3_moe")), capture=capture)
    assert capture.replays > capture.graphs


def save_architecture(folder: Path, model_type: str) -> tuple[Path, DecoderConfig]:
    config = small_architecture(model_type, vocab_size=280)
    return save_small_model(folder, small_model(config=config)), config


@pytest.mark.real_clock
async def test_the_error_of_a_strict_engine_for_experts_names_file_and_remedy(tmp_path: Path) -> None:
    folder, _ = save_architecture(tmp_path, "qwen3_moe")
    message = r'config\.json has model_type qwen3_moe: .*set determinism to "fast"'
    with pytest.raises(NotBatchInvariant, match=message):
        async with started(EmbeddedEngine(folder, Capacity(96, 8, 96), strict=True)):
            pass


@pytest.mark.real_clock
@pytest.mark.parametrize("model_type", DENSE)
async def test_a_strict_engine_starts_with_every_dense_architecture(tmp_path: Path, model_type: str) -> None:
    folder, config = save_architecture(tmp_path, model_type)
    engine = EmbeddedEngine(folder, Capacity(96, 8, 96), strict=True, prefill_tokens=16, max_running=4)
    async with started(engine):
        request = GenerationRequest(1, random_ids(8, 0), 6, GREEDY)
        assert_greedy(small_model(config=config), request, await engine.generate(request))
