"""Measures the embedded engine on one device: decoding, and new weights from a learner in another process.

Learner and engine transfer weights in two ways: through the memory of their GPU, and through a slot in shared memory.
"""

import asyncio
import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from structlog.testing import capture_logs

from asterism.analysis.planning.model_size import measure_model
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.learner.weight_publisher import WeightPublisher
from asterism.engine.model.causal_lm import CausalLM
from benchmarks.gpu.process_group import MEMORY_VARIABLE
from benchmarks.gpu.result_file import Figures, has_failed, measure_parts
from benchmarks.gpu.training import measure_seconds, synchronize
from benchmarks.gpu.weight_engine import (
    ENGINE_DTYPE,
    EngineFailed,
    LoadedWeights,
    WeightEngine,
    describe_events,
    make_sharing,
    running_engine,
    sum_bits,
)
from benchmarks.support.engine_rate import PROMPT_TOKENS, fill_randomly, measure_decode_rate, write_random_model

_MEMORY = Path(os.environ.get(MEMORY_VARIABLE, "/dev/shm"))
_ROUNDS = 3  # rounds of each path; the first round allocates the slot and is not counted
_VALUE_BYTES = ENGINE_DTYPE.itemsize
_SPARE_BYTES = 256 << 20  # bytes of shared memory that stay free for other files
_EXPECTED_EVENT = "weights.from_slot"  # the engine's event if the learner shares no memory


def choose_folder(num_bytes: int) -> Path:
    """Return a folder in /dev/shm, or the temporary folder if /dev/shm is absent or too small, as in containers."""
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > num_bytes + _SPARE_BYTES
    return _MEMORY if has_room else Path(tempfile.gettempdir())


def measure_weights(config: DecoderConfig, device: torch.device) -> Figures:
    """Measure the seconds from float32 weights of the learner to bfloat16 weights of the engine.

    `weights_s` is the time through the memory of the GPU (on a CPU through a file), and `slot_weights_s` the time
    through the slot. A path fails if the engine's bits differ from the learner's. The other path keeps its figures.
    """
    with device:
        model = CausalLM(config)
    fill_randomly(model)
    folder = choose_folder(2 * _VALUE_BYTES * measure_model(config).total)
    measure = partial(_measure_path, model, device, folder)
    parts = {"slot": partial(measure, is_shared=False), "ipc": partial(measure, is_shared=True)}
    return {**measure_parts(parts), "folder": str(folder)}


def _measure_path(model: CausalLM, device: torch.device, parent: Path, *, is_shared: bool) -> Figures:
    """Measure one path. Raises EngineFailed if the engine's weights differ or if it used the other path."""
    expected = sum_bits(each.detach().to(ENGINE_DTYPE) for each in model.parameters())
    with tempfile.TemporaryDirectory(dir=parent) as name, running_engine(model.config, device, Path(name)) as engine:
        sharing = make_sharing(device, Path(name)) if is_shared else None
        parameters = dict(model.named_parameters())
        publisher = WeightPublisher(Path(name), parameters, ENGINE_DTYPE, 1, sharing=sharing)
        rounds = [_change_weights(publisher, engine, version, device) for version in range(_ROUNDS)]
        publisher.close()
    for _, loaded in rounds:
        if loaded.sum_of_bits != expected:
            raise EngineFailed(f"the engine holds other weights: the sum is {loaded.sum_of_bits}, not {expected}")
        if loaded.is_shared != is_shared:
            raise EngineFailed(f"the engine loaded the slot: {', '.join(loaded.logged)}")
    publish_s, load_s = min(((taken_s, loaded.load_s) for taken_s, loaded in rounds[1:]), key=sum)
    prefix = "" if is_shared else "slot_"
    seconds = {"publish_s": publish_s, "load_s": load_s, "weights_s": publish_s + load_s}
    logged = sorted({line for _, loaded in rounds for line in loaded.logged if not line.startswith(_EXPECTED_EVENT)})
    figures: Figures = {f"{prefix}{key}": value for key, value in seconds.items()}
    return figures | ({f"{prefix}logged": "; ".join(logged)} if logged else {})


def _change_weights(
    publisher: WeightPublisher, engine: WeightEngine, version: int, device: torch.device
) -> tuple[float, LoadedWeights]:
    """Publish a version. Return the seconds, and the engine's answer with the log lines of both processes."""
    synchronize(device)
    began = time.perf_counter()
    with capture_logs() as events:
        published = publisher.publish(version)
    publish_s = time.perf_counter() - began
    assert published is not None
    loaded = engine.load(published)
    return publish_s, loaded._replace(logged=describe_events(events) + loaded.logged)


# ---------------------------------------------------------------- decoding


def measure_bandwidth(device: torch.device, size: int) -> float:
    """Measure the bytes per second that a copy reads and writes."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / measure_seconds(lambda: target.copy_(source), device, rounds=5)


def measure_decoding(
    config: DecoderConfig, device: torch.device, *, batch: int, new_tokens: int, copied_bytes: int
) -> Figures:
    """Measure tokens per second, and their share of the limit that the reads of weights and KV cache set."""
    parts = {
        "decode": partial(_measure_rate, config, device, batch, new_tokens),
        "bandwidth": partial(_measure_limit, config, device, batch, new_tokens, copied_bytes),
    }
    figures = measure_parts(parts)
    if has_failed(figures):
        return figures
    return figures | {
        "share_of_bandwidth": float(figures["decoded_tokens_per_s"]) / float(figures["limit_tokens_per_s"])
    }


def _measure_rate(config: DecoderConfig, device: torch.device, batch: int, new_tokens: int) -> Figures:
    parent = choose_folder(_VALUE_BYTES * measure_model(config).total)
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        write_random_model(folder, config, device)
        return {"decoded_tokens_per_s": asyncio.run(measure_decode_rate(folder, config, device, batch, new_tokens))}


def _measure_limit(
    config: DecoderConfig, device: torch.device, batch: int, new_tokens: int, copied_bytes: int
) -> Figures:
    size = measure_model(config)
    # The embedding is read by rows, the output matrix as a whole.
    weights = size.total - (0 if config.tie_word_embeddings else size.output)
    cached_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    read = _VALUE_BYTES * (weights + batch * cached_token * (PROMPT_TOKENS + new_tokens / 2))
    return {"limit_tokens_per_s": batch * measure_bandwidth(device, copied_bytes) / read}
