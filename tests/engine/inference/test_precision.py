"""Tests of the difference between logprobs of the engine and transformers, in float32 and bfloat16 (docs/engine.md)."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asterism.configs.schema.algorithm import GREEDY
from asterism.engine.contract import Capacity, Generation, GenerationRequest
from asterism.engine.hf.architectures import ARCHITECTURES
from asterism.engine.inference.embedded import EmbeddedEngine
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.model.causal_lm import CausalLM
from tests.engine.inference.cores import draw_request, generate
from tests.engine.model.transformers_reference import SCALINGS, load_reference, scaled_architecture
from tests.engine.started_engines import started
from tests.engine.tiny_models import random_ids, small_config, small_model

pytestmark = pytest.mark.slow  # imports transformers
REQUESTS = [draw_request(number, 8 + 5 * number, 60) for number in range(8)]
CONFIGS = [
    small_config(vocab_size=280),
    small_config(vocab_size=280, num_kv_heads=1),
    small_config(vocab_size=280, num_kv_heads=4, tie_word_embeddings=False),
]
ARCHITECTURE_CONFIGS = [
    *(scaled_architecture(model_type, "default") for model_type in ARCHITECTURES),
    *(scaled_architecture(model_type, "default", tie_word_embeddings=False) for model_type in ARCHITECTURES),
    *(scaled_architecture("llama", scaling) for scaling in SCALINGS if scaling != "default"),
    scaled_architecture("qwen2", "yarn"),
    scaled_architecture("qwen3_moe", "yarn"),
]


def generated(model: CausalLM) -> list[Generation]:
    """Generate all requests in one batch, and prefill the longer prompts in chunks."""
    found = generate(EngineCore(model, Capacity(2048, 16, 128), prefill_tokens=30), *REQUESTS)
    return [found[request.sequence_id] for request in REQUESTS]


def build_reference(
    model: CausalLM, folder: Path, dtype: torch.dtype
) -> Callable[[list[Generation]], NDArray[np.float32]]:
    """Return a function that computes logprobs of the same tokens with transformers, by one forward per sequence."""
    reference = load_reference(folder, model).to(dtype)

    def logprobs(generations: list[Generation]) -> NDArray[np.float32]:
        parts: list[NDArray[np.float32]] = []
        for request, generation in zip(REQUESTS, generations, strict=True):
            ids = torch.tensor(np.concatenate((request.token_ids, generation.token_ids)), dtype=torch.int64)
            with torch.inference_mode():
                logits = reference(ids[None]).logits[0, len(request.token_ids) - 1 : -1].float()
            wanted = ids[len(request.token_ids) :, None]
            parts.append(logits.log_softmax(-1).gather(-1, wanted).squeeze(-1).numpy())
        return np.concatenate(parts)

    return logprobs


def join_logprobs(generations: list[Generation]) -> NDArray[np.float32]:
    return np.concatenate([generation.logprobs for generation in generations])


@pytest.mark.parametrize("number", range(len(CONFIGS) + len(ARCHITECTURE_CONFIGS)))
def test_float32_logprobs_equal_transformers(tmp_path: Path, number: int) -> None:
    model = small_model(number, (CONFIGS + ARCHITECTURE_CONFIGS)[number])
    found = generated(model)
    differences = np.abs(join_logprobs(found) - build_reference(model, tmp_path, torch.float32)(found))
    assert differences.max() < 1e-4  # measured: 2e-5


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_bfloat16_logprobs_differ_within_the_documented_bounds(tmp_path: Path, number: int) -> None:
    model = small_model(number, CONFIGS[number])
    exact = build_reference(model, tmp_path / "exact", torch.float32)
    low = build_reference(model, tmp_path / "low", torch.bfloat16)
    found = generated(model.to(torch.bfloat16))
    for reference in (low(found), exact(found)):
        differences = np.abs(join_logprobs(found) - reference)
        assert 1e-3 < differences.mean() < 0.035  # measured: 0.025; float32 has 1e-6
        assert np.quantile(differences, 0.99) < 0.15  # measured: 0.10
        assert differences.max() < 0.6  # measured: 0.31
    assert np.abs(join_logprobs(found) - exact(found)).mean() < 1.2 * np.abs(low(found) - exact(found)).mean()


@pytest.mark.real_clock
async def test_greedy_tokens_equal_transformers_generate(model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    lengths = (1, 5, 17, 40, 3, 90)
    async with started(EmbeddedEngine(model_folder, Capacity(1200, 16, 400), max_running=3)) as (engine, _):

        async def answer(number: int, length: int) -> None:
            ids, count = random_ids(length, number), 10 + 15 * number
            found = await engine.generate(GenerationRequest(number, ids, count, GREEDY))
            engine.release_cache(number)
            prompt = torch.from_numpy(ids.astype(np.int64))[None]
            wanted = theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert found.token_ids.tolist() == wanted[0, length:].tolist()

        await asyncio.gather(*(answer(number, length) for number, length in enumerate(lengths)))
