"""Publishes the frozen weights once and then the adapters of each version, or all weights (learner.lora.publish)."""

from pathlib import Path

import torch

from asterism.bus.messages import WeightsPublished
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.weight_publisher import AdapterMerger, WeightPublisher
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.lora_linear import list_adapter_parameters, list_adapters, list_base_parameters
from asterism.engine.weight_transfer.adapter_slots import ADAPTER_DTYPE, BASE_RECORD_BYTES, BASE_VERSION, AdapterBase
from asterism.engine.weight_transfer.memory_sharing import CudaSharing
from asterism.engine.weight_transfer.published_bytes import shares_gpu_weights


def build_publisher(
    run: RunConfig, folder: Path, model: CausalLM, ranks: RankGroup
) -> "WeightPublisher | AdapterPublisher":
    """Build the publisher that learner.lora.publish selects. `folder`: the slots' folder."""
    options = getattr(torch, run.engine.dtype), run.num_weight_versions, ranks
    if run.learner.lora.publish == "adapters":
        return AdapterPublisher(folder, model, *options)
    sharing = CudaSharing(ranks.device) if shares_gpu_weights(run) else None
    return WeightPublisher(folder, list_base_parameters(model), *options, AdapterMerger(model), sharing=sharing)


class AdapterPublisher:
    """A publisher of adapters. The slot after the adapters' slots contains their base until `close`. A restarted
    learner writes the same base again, because a killed learner can leave the base incomplete."""

    def __init__(
        self, folder: Path, model: CausalLM, dtype: torch.dtype, num_slots: int = 2, ranks: RankGroup | None = None
    ) -> None:
        """`model` has adapters, and is whole or sharded over the ranks. `dtype`: dtype of the published base."""
        self._base = WeightPublisher(folder, list_base_parameters(model), dtype, 1, ranks, first_slot=num_slots)
        self._adapters = WeightPublisher(
            folder, list_adapter_parameters(model), ADAPTER_DTYPE, num_slots, ranks, prefix_bytes=BASE_RECORD_BYTES
        )
        self._base_slot = num_slots
        self._scale = next(iter(list_adapters(model).values())).options.scale
        self._record = b""  # describes the base; only on the leading rank
        self._has_base = False
        self.num_bytes = self._adapters.num_bytes  # bytes of a publication without the base

    def publish(self, version: int) -> WeightsPublished | None:
        """Publish a version. Every rank calls it; the leading rank returns the message for the engines."""
        if not self._has_base:
            base = self._base.publish(BASE_VERSION)
            if base is not None:
                self._record = AdapterBase(self._base_slot, base.num_bytes, base.digest, self._scale).pack()
            self._has_base = True
        return self._adapters.publish(version, self._record)

    def close(self) -> None:
        """Remove the published weights."""
        self._adapters.close()
        self._base.close()
