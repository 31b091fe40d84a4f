"""Tests of handles of a GPU's memory, without a GPU."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asterism.engine.sglang.weights import tensor_handles


def test_a_handle_identifies_the_gpu_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(tensor: SimpleNamespace) -> tuple[Callable[..., None], tuple[object, ...]]:
        return rebuild, ("cls", "size", "stride", 0, "storage", "dtype", tensor.device.index, b"handle", "rest")

    def rebuild() -> None:
        raise AssertionError("the server calls this function")

    def get_properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"GPU-{device.index}")

    monkeypatch.setattr(tensor_handles.reductions, "reduce_tensor", reduce)
    monkeypatch.setattr(torch.cuda, "get_device_properties", get_properties)
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 3))
    _, arguments = tensor_handles._reduce_tensor(tensor)  # pyright: ignore[reportPrivateUsage]
    assert arguments == ("cls", "size", "stride", 0, "storage", "dtype", "GPU-3", b"handle", "rest")
