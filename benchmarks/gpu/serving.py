"""The embedded engine on one device: decoding, and the limit that memory sets."""

import asyncio
import tempfile
from pathlib import Path

import torch

from analysis.planning.model_size import measure_model
from benchmarks.gpu.training import measure_seconds
from benchmarks.support.engine_rate import PROMPT_TOKENS, measure_decode_rate, write_checkpoint
from engine.model.model_config import DecoderConfig

_MEMORY = Path("/dev/shm")
_VALUE_BYTES = 2  # bfloat16


def measure_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / measure_seconds(lambda: target.copy_(source), device, rounds=5)


def measure_decoding(
    config: DecoderConfig, device: torch.device, *, batch: int, new_tokens: int, copied_bytes: int
) -> dict[str, float | str]:
    """Tokens per second, and their share of the limit that the reads of weights and KV cache set."""
    with tempfile.TemporaryDirectory(dir=_MEMORY) as name:
        folder = Path(name)
        write_checkpoint(folder, config, device)
        rate = asyncio.run(measure_decode_rate(folder, config, device, batch, new_tokens))
    size = measure_model(config)
    # The embedding is read by rows, the output matrix as a whole.
    weights = size.total - (0 if config.tie_word_embeddings else size.output)
    cached_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    read = _VALUE_BYTES * (weights + batch * cached_token * (PROMPT_TOKENS + new_tokens / 2))
    limit = batch * measure_bandwidth(device, copied_bytes) / read
    return {"decoded_tokens_per_s": rate, "limit_tokens_per_s": limit, "share_of_bandwidth": rate / limit}
