"""Measures the tokens per second of an embedded engine that decodes prompts of equal lengths."""

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from asterism.engine.contract import Capacity, GenerationRequest, TokenListener
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.inference.embedded import EmbeddedEngine
from asterism.engine.model.causal_lm import CausalLM

PROMPT_TOKENS = 256
_PAGE_TOKENS = 256  # GPU kernels read pages of this size in place


class DecodeClock:
    """Measures the decode rate of a batch from the time at which each of its sequences has a token."""

    def __init__(self, batch: int) -> None:
        self._counts = [0] * batch
        self._began_at = 0.0
        self._before = 0  # tokens until `_began_at`

    def count(self, row: int, tokens: int) -> None:
        """Count new tokens of a sequence."""
        self._counts[row] += tokens
        if not self._before and all(self._counts):
            self._began_at, self._before = time.perf_counter(), sum(self._counts)

    def compute_rate(self) -> float:
        """Return the tokens per second until now."""
        return (sum(self._counts) - self._before) / (time.perf_counter() - self._began_at)


async def measure_engine_rate(
    engine: EmbeddedEngine, prompts_BT: NDArray[np.int32], new_tokens: int, clock: DecodeClock | None = None
) -> float:
    """Measure new tokens per second, with the prefill. `clock` counts the tokens of each sequence."""

    def listen(row: int) -> TokenListener | None:
        if clock is None:
            return None
        counting = clock
        return lambda tokens: counting.count(row, len(tokens))

    started = time.perf_counter()
    requests = [GenerationRequest(row, prompt, new_tokens, seed=row) for row, prompt in enumerate(prompts_BT)]
    generations = await asyncio.gather(*(engine.generate(request, listen(row)) for row, request in enumerate(requests)))
    elapsed_s = time.perf_counter() - started
    assert all(len(generation.token_ids) == new_tokens for generation in generations)
    for request in requests:
        engine.release_cache(request.sequence_id)
    return len(requests) * new_tokens / elapsed_s


@torch.no_grad()
def fill_randomly(model: nn.Module) -> None:
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.normal_(0.0, 0.02) if local.dim() > 1 else local.fill_(1.0)


def write_random_model(folder: Path, config: DecoderConfig, device: torch.device) -> None:
    """Write a checkpoint of random bfloat16 weights, drawn on the device."""
    with device:
        model = CausalLM(config).to(torch.bfloat16)
    fill_randomly(model)
    write_model(folder, model)


def write_model(folder: Path, model: CausalLM) -> None:
    """Write a checkpoint without a tokenizer."""
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_hf()))


async def measure_decode_rate(
    folder: Path, config: DecoderConfig, device: torch.device, batch: int, new_tokens: int
) -> float:
    """Measure the decoded tokens per second of `batch` sequences in bfloat16. The prefill is not counted."""
    tokens = -(-(PROMPT_TOKENS + new_tokens) // _PAGE_TOKENS) * _PAGE_TOKENS
    capacity = Capacity(kv_tokens=batch * tokens, page_tokens=_PAGE_TOKENS, sequence_tokens=tokens)
    engine = EmbeddedEngine(
        folder, capacity, dtype=torch.bfloat16, device=device, max_running=batch, prefill_tokens=batch * PROMPT_TOKENS
    )
    await engine.start()
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (batch, PROMPT_TOKENS), dtype=np.int32)
    await measure_engine_rate(engine, prompts, 4)
    prefill_s = batch / await measure_engine_rate(engine, prompts, 1)
    whole_s = batch * new_tokens / await measure_engine_rate(engine, prompts, new_tokens)
    await engine.close()
    return batch * (new_tokens - 1) / (whole_s - prefill_s)
