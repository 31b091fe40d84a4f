"""The embedded engine on one device: decoding, and new weights from a learner in another process.

Weights arrive through the memory of the GPU that both use, and through a slot in shared memory.
"""

import asyncio
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from analysis.planning.model_size import measure_model
from benchmarks.gpu.training import measure_seconds, synchronize
from benchmarks.gpu.weight_engine import sum_bits
from benchmarks.support.engine_rate import PROMPT_TOKENS, fill_randomly, measure_decode_rate, write_checkpoint
from engine.inference.fused_weights import FusedWeights
from engine.learner.weight_publisher import WeightPublisher
from engine.model.causal_lm import CausalLM
from engine.model.model_config import DecoderConfig
from engine.weight_transfer.memory_sharing import CudaSharing
from engine.weight_transfer.published_loader import PublishedLoader

_MEMORY = Path("/dev/shm")
_ROUNDS = 3  # of each path; the first one allocates the slot, and does not count
_DTYPE, _VALUE_BYTES = torch.bfloat16, 2


def measure_weights(config: DecoderConfig, device: torch.device) -> dict[str, float | str]:
    """Seconds from float32 weights of the learner to bfloat16 weights of the engine.

    On a GPU, `weights_s` is the path through its memory, and `slot_weights_s` the path through shared memory. Raises SystemExit
    if the engine's bits differ from the learner's.
    """
    with device:
        model = CausalLM(config)
    fill_randomly(model)
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    engine = context.Process(target=_run_engine, args=(theirs, config, device), daemon=True)
    engine.start()
    theirs.close()  # so that the end of the process ends a wait for its answer
    slot = _measure_path(model, ours, device, has_buffer=False)
    fastest = _measure_path(model, ours, device, has_buffer=True) if device.type == "cuda" else slot
    ours.send(None)
    engine.join()
    return {**fastest, **{f"slot_{key}": value for key, value in slot.items()}}


def _measure_path(model: CausalLM, engine: Connection, device: torch.device, *, has_buffer: bool) -> dict[str, float]:
    taken: list[tuple[float, float]] = []
    expected = sum_bits(each.detach().to(_DTYPE) for each in model.parameters())
    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        sharing = CudaSharing(device) if has_buffer else None
        publisher = WeightPublisher(Path(folder), dict(model.named_parameters()), _DTYPE, 1, sharing=sharing)
        for version in range(_ROUNDS):
            synchronize(device)
            began = time.perf_counter()
            published = publisher.publish(version)
            publish_s = time.perf_counter() - began
            try:
                engine.send(published)
                load_s, found = engine.recv()
            except (EOFError, BrokenPipeError):
                raise SystemExit("the engine's process ended; its error is above") from None
            if found != expected:
                raise SystemExit(f"the engine holds other weights than the learner: {found} instead of {expected}")
            taken.append((publish_s, load_s))
        publisher.close()
    publish_s, load_s = min(taken[1:], key=sum)
    return {"publish_s": publish_s, "load_s": load_s, "weights_s": publish_s + load_s}


def _run_engine(learner: Connection, config: DecoderConfig, device: torch.device) -> None:
    """Load each version that arrives; answer with the seconds and the sum of the bits."""
    with device:
        model = CausalLM(config)
    weights = FusedWeights(model.to(_DTYPE), device)
    del model
    loader = PublishedLoader(_DTYPE, device)
    while (published := learner.recv()) is not None:
        began = time.perf_counter()
        loader.load(published, weights.parameters)
        weights.update_derived()
        synchronize(device)
        learner.send((time.perf_counter() - began, sum_bits(weights.parameters.values())))


# ---------------------------------------------------------------- decoding


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
