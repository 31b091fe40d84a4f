"""Engines and the GPUs of their machine."""

from __future__ import annotations

import pytest
import torch

from engine.devices import DeviceMissing, device_of


def see(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_each_engine_has_a_gpu_of_its_own_and_shares_only_where_there_are_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    see(monkeypatch, 2)
    assert [str(device_of("cuda", number)) for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert str(device_of("cpu", 1)) == "cpu"


def test_without_a_gpu_the_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 0)
    with pytest.raises(DeviceMissing, match=r"engine\.device is cuda, and torch .* sees no GPU"):
        device_of("cuda", 0)
