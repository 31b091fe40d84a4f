"""Runs a process that holds the weights of an embedded engine and loads the versions that a learner publishes.

The learner shares memory of its GPU by CUDA IPC, or a file if it is on a CPU. A process cannot open a handle of its own
memory, so the engine needs another process.
"""

import mmap
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from structlog.testing import capture_logs
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.inference.fused_weights import FusedWeights
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.weight_transfer.memory_sharing import CudaSharing, MemorySharing, SharedBuffer
from asterism.engine.weight_transfer.published_loader import PublishedLoader
from benchmarks.gpu.training import synchronize

ENGINE_DTYPE = torch.bfloat16
_START_LIMIT_S = 60.0  # the start includes the import of torch and a CUDA context
_ANSWER_LIMIT_S = 20.0
_END_LIMIT_S = 5.0


class EngineFailed(Exception):
    """The engine's process ended, did not answer in time, or failed to load a version. `str(error)` is the cause."""


class LoadedWeights(NamedTuple):
    load_s: float
    sum_of_bits: int
    is_shared: bool  # True if the engine loaded the memory that the learner shares, not the slot
    logged: list[str]
    values: dict[str, NDArray[np.int16]]  # bits by parameter name; empty unless requested


class FileSharing:
    """Implements MemorySharing with files in place of a GPU's memory."""

    kind = device_id = "file"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def allocate(self, num_bytes: int) -> SharedBuffer:
        path = self._folder / "shared_memory"
        path.write_bytes(bytes(num_bytes))
        return SharedBuffer(_map(path), str(path).encode())

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        return _map(Path(handle.decode()))[:num_bytes]


def _map(path: Path) -> Tensor:
    with path.open("r+b") as file:
        return torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8))


def make_sharing(device: torch.device, folder: Path) -> MemorySharing:
    """Return the memory sharing for a device. A CPU shares files in `folder`."""
    return CudaSharing(device) if device.type == "cuda" else FileSharing(folder)


class WeightEngine:
    """The learner's connection to the engine's process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def load(self, published: WeightsPublished, *, returns_values: bool = False) -> LoadedWeights:
        """Load a version. Raises EngineFailed."""
        with self._naming_end():
            self._connection.send((published, returns_values))
        return self.wait(_ANSWER_LIMIT_S)

    def load_shared(self, published: WeightsPublished, *, returns_values: bool = False) -> LoadedWeights:
        """Load a version from shared memory. Raises EngineFailed if the engine loads the slot instead."""
        loaded = self.load(published, returns_values=returns_values)
        if not loaded.is_shared:
            raise EngineFailed(f"the engine loaded the slot: {', '.join(loaded.logged)}")
        return loaded

    def wait(self, limit_s: float) -> Any:
        """Return the next answer. Raises EngineFailed."""
        with self._naming_end():
            if not self._connection.poll(limit_s):
                raise EngineFailed(f"no answer of the engine's process after {limit_s:g} s")
            answer = self._connection.recv()
        if isinstance(answer, str):
            raise EngineFailed(f"the engine's process failed: {answer}")
        return answer

    @contextmanager
    def _naming_end(self) -> Generator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise EngineFailed("the engine's process ended; its error is on stderr") from error


@contextmanager
def running_engine(config: DecoderConfig, device: torch.device, folder: Path) -> Generator[WeightEngine]:
    """Start an engine's process, and end it with the context. Raises EngineFailed if it does not start."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, config, device, folder), daemon=True)
    process.start()
    theirs.close()  # otherwise a wait for an answer would not end with the process
    try:
        engine = WeightEngine(ours)
        engine.wait(_START_LIMIT_S)
        yield engine
    finally:
        ours.close()
        process.join(_END_LIMIT_S)
        process.kill()
        process.join()


def _answer(learner: Connection, config: DecoderConfig, device: torch.device, folder: Path) -> None:
    """Load each version that arrives, and send LoadedWeights or an error, until the learner closes the connection."""
    try:
        with device:
            model = CausalLM(config)
        weights = FusedWeights(model.to(ENGINE_DTYPE), device)
        del model
        loader = PublishedLoader(ENGINE_DTYPE, device, sharing=make_sharing(device, folder))
        learner.send(None)
        while True:
            published, returns_values = learner.recv()
            learner.send(_load(loader, weights, published, device, returns_values=returns_values))
    except EOFError:
        return
    except Exception as error:  # the learner's process raises the error as EngineFailed
        learner.send(f"{type(error).__name__}: {error}")
        raise


def _load(
    loader: PublishedLoader,
    weights: FusedWeights,
    published: WeightsPublished,
    device: torch.device,
    *,
    returns_values: bool,
) -> LoadedWeights:
    reader = loader.device_reader
    assert reader is not None
    earlier_loads, began = reader.num_loads, time.perf_counter()
    with capture_logs() as events:
        loader.load(published, weights.parameters)
    weights.update_derived()
    synchronize(device)
    load_s, is_shared = time.perf_counter() - began, reader.num_loads > earlier_loads
    values = {name: _copy_bits(each) for name, each in weights.parameters.items()} if returns_values else {}
    return LoadedWeights(load_s, sum_bits(weights.parameters.values()), is_shared, describe_events(events), values)


def describe_events(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Format each event as a line, such as `weights.from_slot: cause=...`."""
    return [
        f"{each['event']}: " + " ".join(f"{key}={value}" for key, value in each.items() if key != "event")
        for each in events
    ]


def sum_bits(tensors: Iterable[Tensor]) -> int:
    """Return the sum of all 16-bit values as integers."""
    return sum(int(each.view(torch.int16).sum(dtype=torch.int64)) for each in tensors)


def _copy_bits(values: Tensor) -> NDArray[np.int16]:
    return values.detach().cpu().contiguous().view(torch.int16).numpy()
