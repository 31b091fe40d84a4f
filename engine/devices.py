"""Which device an engine computes on."""

from __future__ import annotations

from typing import Literal

import torch

from configs.errors import UnusableInput


class DeviceMissing(UnusableInput):
    """This machine, or this torch, has no such device."""


def device_of(kind: Literal["cpu", "cuda"], number: int) -> torch.device:
    """Of engine `number` of this machine: each has a GPU, or shares one where there are fewer. Raises DeviceMissing."""
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise DeviceMissing(f"engine.device is cuda, and torch {torch.__version__} sees no GPU: see `asterism doctor`")
    return torch.device("cuda", number % count)
