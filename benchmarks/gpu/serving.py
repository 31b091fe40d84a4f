"""The embedded engine on one device: new weights from a learner on the same device, and decoding."""

import asyncio
import tempfile
import time
from pathlib import Path

import torch

from analysis.planning.model_size import measure_model
from benchmarks.gpu.training import measure_seconds, synchronize
from benchmarks.support.engine_rate import PROMPT_TOKENS, fill_randomly, measure_decode_rate, write_checkpoint
from engine.inference.fused_weights import FusedWeights
from engine.learner.weight_publisher import WeightPublisher
from engine.model.causal_lm import CausalLM
from engine.model.model_config import DecoderConfig
from engine.weight_transfer.shared_memory import load_published

_MEMORY = Path("/dev/shm")
_VALUE_BYTES = 2  # bfloat16


def measure_weights(config: DecoderConfig, device: torch.device) -> dict[str, float | str]:
    """Seconds from float32 weights of the learner to bfloat16 weights of the engine, through a slot in shared memory."""
    with device:
        model = CausalLM(config)
    fill_randomly(model)
    engine = FusedWeights(model.to(torch.bfloat16), device)
    model.to(torch.float32)
    taken: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        publisher = WeightPublisher(Path(folder), dict(model.named_parameters()), torch.bfloat16, 1)
        for version in range(3):
            synchronize(device)
            began = time.perf_counter()
            published = publisher.publish(version)
            written = time.perf_counter()
            assert published is not None
            load_published(published, engine.parameters, torch.bfloat16)
            engine.update_derived()
            synchronize(device)
            taken.append((written - began, time.perf_counter() - written))
        publisher.close()
    publish_s, load_s = min(taken[1:], key=sum)  # the first one allocates the slot
    return {"publish_s": publish_s, "load_s": load_s, "weights_s": publish_s + load_s}


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
