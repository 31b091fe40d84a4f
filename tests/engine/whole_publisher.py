"""Publishes whole parameters as a learner with one rank does. Each version has parameters of its own."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.learner.adapters.adapter_publisher import AdapterPublisher
from asterism.engine.learner.weight_publisher import WeightPublisher
from asterism.engine.weight_transfer.slot_file import get_body_offset


class WholePublisher:
    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._folder, self._dtype = folder, dtype

    def publish(self, version: int, parameters: Mapping[str, Tensor]) -> WeightsPublished:
        return publish(WeightPublisher(self._folder, parameters, self._dtype), version)

    def close(self) -> None:
        WeightPublisher(self._folder, {}, self._dtype).close()


def publish(publisher: WeightPublisher | AdapterPublisher, version: int) -> WeightsPublished:
    """Publish as the only rank."""
    published = publisher.publish(version)
    assert published is not None
    return published


def damage(published: WeightsPublished) -> None:
    """Change two bytes of the slot's first parameter."""
    with Path(published.path).open("r+b") as file:
        file.seek(get_body_offset(published.num_bytes) + 9)
        file.write(b"\x55\x55")
