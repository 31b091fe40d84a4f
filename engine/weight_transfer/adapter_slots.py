"""Publishes and loads adapters: a small slot names its base, which is a slot with the frozen weights.

The body of an adapter slot, which the digest covers:

    offset 0          the base: number, bytes and digest of its slot; scale of the adapters
    offset 64         the matrices A and B in float32 (asterism.engine.model.lora_linear)

The base is published once by each incarnation of the learner, and stays valid until the learner ends.
"""

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import WeightsRefused
from asterism.engine.model.lora_linear import merge_rows, name_adapter
from asterism.engine.model.lora_options import LoraOptions
from asterism.engine.weight_transfer.shared_memory import copy_into, open_body, open_published, wait_for_copies
from asterism.engine.weight_transfer.slot_file import HEADER, build_header, get_body_offset, get_slot_path, parse_header
from asterism.engine.weight_transfer.slot_mappings import SlotMappings
from asterism.engine.weight_transfer.weight_layout import WeightLayout, get_layout

BASE_VERSION = 0  # version in the header of the base: the policy before RL
BASE_RECORD_BYTES = 64
ADAPTER_DTYPE = torch.float32
_RECORD = struct.Struct("<qq16sd")
_MERGED_BYTES = 64 * 2**20  # bytes of float32 values that are merged at once


class AdapterBase(NamedTuple):
    slot: int  # number of the base's slot, in the folder of the adapters
    num_bytes: int
    digest: str
    scale: float  # scale of the adapters: alpha / r

    def pack(self) -> bytes:
        record = _RECORD.pack(self.slot, self.num_bytes, bytes.fromhex(self.digest), self.scale)
        return record.ljust(BASE_RECORD_BYTES, b"\0")

    def locate(self, adapters: WeightsPublished) -> WeightsPublished:
        """Return the base of these adapters, on the same machine."""
        path = get_slot_path(Path(adapters.path).parent, self.slot)
        return WeightsPublished(BASE_VERSION, str(path), self.num_bytes, self.digest)


def parse_base(body: bytes) -> AdapterBase:
    """Parse the record of the base. `body`: at least its first BASE_RECORD_BYTES."""
    slot, num_bytes, digest, scale = _RECORD.unpack_from(body)
    return AdapterBase(slot, num_bytes, digest.hex(), scale)


def read_base(adapters: WeightsPublished) -> AdapterBase:
    """Read the base from the slot of the adapters. Raises WeightsRefused if the slot contains other weights."""
    try:
        with Path(adapters.path).open("rb", buffering=0) as file:
            header = parse_header(file.read(HEADER.size))
            record = os.pread(file.fileno(), BASE_RECORD_BYTES, get_body_offset(adapters.num_bytes))
    except FileNotFoundError:
        header, record = None, b""
    if header != build_header(adapters):
        raise WeightsRefused(f"{adapters.path} does not hold the adapters of version {adapters.version}")
    return parse_base(record)


def get_adapter_layout(parameters: Mapping[str, Tensor], options: LoraOptions) -> WeightLayout:
    """Return the layout of the adapters. `parameters`: the weights of the model, without adapters."""
    suffixes, shapes = tuple(f".{target}.weight" for target in options.targets), dict[str, tuple[int, int]]()
    for name, weights in parameters.items():
        if name.endswith(suffixes):
            shapes[name_adapter(name, "A")] = options.rank, weights.shape[1]
            shapes[name_adapter(name, "B")] = weights.shape[0], options.rank
    return WeightLayout(shapes, ADAPTER_DTYPE, BASE_RECORD_BYTES)


class AdapterLoader:
    """Merges published adapters into the parameters of one engine."""

    def __init__(self, dtype: torch.dtype, options: LoraOptions, mappings: SlotMappings | None = None) -> None:
        """`dtype`: the base's dtype."""
        self._dtype, self._options, self._mappings = dtype, options, mappings
        self._held_base = ""  # digest of the base whose parameters without adapters the engine keeps

    @torch.no_grad()
    def load(self, adapters: WeightsPublished, parameters: Mapping[str, Tensor]) -> None:
        """Write base + scale B A into `parameters`, or leave them unchanged and raise WeightsRefused.

        `parameters`: the same at each call. The sum is computed in float32 blocks and converted to `dtype`.
        """
        adapter_layout = get_adapter_layout(parameters, self._options)
        with open_body(adapters, adapter_layout, self._mappings) as body:
            base, matrices = parse_base(body[:BASE_RECORD_BYTES].numpy().tobytes()), adapter_layout.view(body)
            base_layout = get_layout(parameters, self._dtype)
            with open_published(base.locate(adapters), base_layout, self._mappings) as weights:
                for name, parameter in parameters.items():
                    a_KI = matrices.get(name_adapter(name, "A"))
                    if a_KI is not None:
                        _merge_into(parameter, weights[name], matrices[name_adapter(name, "B")], a_KI, base.scale)
                    elif base.digest != self._held_base:
                        copy_into(parameter, weights[name])
                wait_for_copies(parameters)
        self._held_base = base.digest


def _merge_into(parameter: Tensor, weights: Tensor, b_OK: Tensor, a_KI: Tensor, scale: float) -> None:
    """Write W + scale B A into the parameter; the products are computed on its device."""
    a_KI = a_KI.to(parameter.device)
    num_rows = max(1, _MERGED_BYTES // (ADAPTER_DTYPE.itemsize * weights.shape[1]))
    blocks = zip(parameter.split(num_rows), weights.split(num_rows), b_OK.split(num_rows), strict=True)
    for into, rows, rows_b in blocks:
        rows = rows.to(parameter.device, ADAPTER_DTYPE)
        copy_into(into, merge_rows(rows, rows_b.to(parameter.device), a_KI, scale))
