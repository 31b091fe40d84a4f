"""New weights from a learner to an embedded engine in another process, through the memory of their GPU and through a slot."""

import tempfile
import time
from collections.abc import Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.training import synchronize
from benchmarks.support.engine_rate import fill_randomly
from engine.inference.fused_weights import FusedWeights
from engine.learner.weight_publisher import WeightPublisher
from engine.model.causal_lm import CausalLM
from engine.model.model_config import DecoderConfig
from engine.weight_transfer.memory_sharing import CudaSharing
from engine.weight_transfer.published_loader import PublishedLoader

_MEMORY = Path("/dev/shm")
_ROUNDS = 3  # of each path; the first one allocates the slot, and does not count
_DTYPE = torch.bfloat16


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
            engine.send(published)
            load_s, found = engine.recv()
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


def sum_bits(tensors: Iterable[Tensor]) -> int:
    """The sum of all 16-bit values as integers."""
    return sum(int(each.view(torch.int16).sum(dtype=torch.int64)) for each in tensors)
