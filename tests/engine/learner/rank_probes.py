"""Descriptions of a rank's parameters, and measurements of the peak of its memory."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class ParameterForm(msgspec.Struct, frozen=True):
    is_sharded: bool
    dtype: str
    local_share: float  # this rank's share of the elements


def describe_parameters(model: torch.nn.Module) -> dict[str, ParameterForm]:
    return {name: _describe(parameter) for name, parameter in model.named_parameters()}


def _describe(parameter: Tensor) -> ParameterForm:
    if isinstance(parameter, DTensor):
        return ParameterForm(True, str(parameter.dtype), parameter.to_local().numel() / parameter.numel())
    return ParameterForm(False, str(parameter.dtype), 1.0)


class MemoryPeak:
    """The peak growth of the process's anonymous memory since the start of the measurement, in bytes."""

    def __init__(self) -> None:
        self._start = self._largest = read_anonymous_bytes()

    def update(self) -> None:
        self._largest = max(self._largest, read_anonymous_bytes())

    @property
    def growth(self) -> int:
        return self._largest - self._start


def read_anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return 1024 * int(kib)


@contextmanager
def measuring_memory() -> Generator[MemoryPeak]:
    """Measure the peak in another thread, with a sample every millisecond."""
    peak, stop = MemoryPeak(), threading.Event()

    def sample() -> None:
        while not stop.wait(0.001):
            peak.update()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak.update()
