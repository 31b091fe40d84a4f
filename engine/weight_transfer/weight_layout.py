"""Places the parameters in a slot: sorted by name, in one dtype, each at a multiple of 64 bytes."""

from collections.abc import Mapping, Sequence
from math import prod
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asterism.engine.model.hf_checkpoint import build_empty_model
from asterism.engine.weight_transfer.slot_file import get_body_offset

_ALIGNMENT = 64


class _Place(NamedTuple):
    start: int  # offset in values
    shape: tuple[int, ...]


class WeightLayout:
    """The places of all parameters of a model, after a prefix. `num_bytes`: size of the body of the slot."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, prefix_bytes: int = 0) -> None:
        """`prefix_bytes`: a multiple of 64."""
        self.dtype = dtype
        self._prefix_bytes = prefix_bytes
        self._places: dict[str, _Place] = {}
        step, start = _ALIGNMENT // dtype.itemsize, 0
        for name in sorted(shapes):
            self._places[name] = _Place(start, tuple(shapes[name]))
            start += -(-prod(shapes[name]) // step) * step
        self.num_bytes = prefix_bytes + start * dtype.itemsize

    def list_names(self) -> list[str]:
        """List the parameters in the order of their places."""
        return list(self._places)

    def find_end(self, name: str) -> int:
        """Return the offset in the body of the first byte after the parameter; the end of the body for the last one."""
        place = self._places[name]
        step = _ALIGNMENT // self.dtype.itemsize
        return self._prefix_bytes + (place.start + -(-prod(place.shape) // step) * step) * self.dtype.itemsize

    def view(self, body: Tensor) -> dict[str, Tensor]:
        """Return views of the parameters. `body`: uint8 [num_bytes]."""
        values = body[self._prefix_bytes :].view(self.dtype)
        return {
            name: values[place.start : place.start + prod(place.shape)].view(place.shape)
            for name, place in self._places.items()
        }


def get_layout(parameters: Mapping[str, Tensor], dtype: torch.dtype, prefix_bytes: int = 0) -> WeightLayout:
    """Return the layout of the parameters. `parameters`: whole or sharded."""
    return WeightLayout({name: parameter.shape for name, parameter in parameters.items()}, dtype, prefix_bytes)


def load_layout(folder: Path, dtype: torch.dtype) -> WeightLayout:
    """Return the layout of the model in a checkpoint folder. Raises CheckpointError or UnsupportedModel."""
    return get_layout(dict(build_empty_model(folder).named_parameters()), dtype)


def view_body(slot: mmap, num_bytes: int) -> Tensor:
    """Return the parameters in the content of a slot: uint8 [num_bytes]."""
    return torch.from_numpy(np.frombuffer(slot, np.uint8, num_bytes, get_body_offset(num_bytes)))
