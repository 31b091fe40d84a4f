"""Loads a published version into an embedded engine.

adapters                     from a slot, merged with their base
weights of a learner with    from the memory of that GPU, or from the slot if that fails. Never run on a GPU
  one rank on the same GPU
other weights                from a slot, with page-locked memory for an engine on a GPU
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.model.lora_options import LoraOptions
from asterism.engine.weight_transfer.adapter_slots import AdapterLoader
from asterism.engine.weight_transfer.chunk_digests import count_device_threads
from asterism.engine.weight_transfer.device_weights import DeviceWeightsReader
from asterism.engine.weight_transfer.memory_sharing import CudaSharing, MemorySharing
from asterism.engine.weight_transfer.page_locks import make_page_locker
from asterism.engine.weight_transfer.shared_memory import load_published
from asterism.engine.weight_transfer.slot_mappings import SlotMappings


class PublishedLoader:
    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        lora: LoraOptions | None = None,
        sharing: MemorySharing | None = None,
    ) -> None:
        """`lora`: options of published adapters. `sharing`: how a learner on `device` shares its memory."""
        self._dtype = dtype
        self._mappings = SlotMappings(make_page_locker(device), count_device_threads(device))
        self._adapters = None if lora is None else AdapterLoader(dtype, lora, self._mappings)
        sharing = CudaSharing(device) if sharing is None and device.type == "cuda" else sharing
        self.device_reader = None if sharing is None or lora is not None else DeviceWeightsReader(sharing)

    def load(self, weights: WeightsPublished, parameters: Mapping[str, Tensor]) -> None:
        """Load the weights into `parameters`, or leave them unchanged and raise WeightsRefused."""
        if self._adapters is not None:
            self._adapters.load(weights, parameters)
        elif self.device_reader is None or not self.device_reader.load(weights, parameters, self._dtype):
            load_published(weights, parameters, self._dtype, self._mappings)
