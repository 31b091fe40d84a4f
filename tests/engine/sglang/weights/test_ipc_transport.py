"""Tests of the transport by memory handles, with torch's shared memory. Its CUDA calls have never run on a GPU."""

from contextlib import nullcontext

import pytest
import torch
from structlog.testing import capture_logs

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import WeightsRefused
from asterism.engine.sglang.http_api import UpdateRefused
from asterism.engine.sglang.weights import ipc_transport
from tests.engine.sglang.weights.fake_weight_server import UPDATES, FakeWeightServer
from tests.engine.sglang.weights.update_scenes import END, RESUME, Make, update

pytestmark = [pytest.mark.real_clock, pytest.mark.slow]


async def test_requests_contain_handles_instead_of_values(make: Make, weights: WeightsPublished) -> None:
    sizes: list[int] = []
    for name in ("tensor", "ipc"):
        server = FakeWeightServer()
        await update(make(name, bucket=1 << 30), server, weights)
        (body,) = server.get_bodies(UPDATES[name])
        sizes.append(len(body["serialized_named_tensors"][0]))
    assert sizes[0] > weights.num_bytes > sizes[1]


async def test_an_update_is_refused_if_memory_is_missing_for_a_part(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> bytes:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(ipc_transport, "pickle_handles", refuse)
    with pytest.raises(WeightsRefused, match="cannot be shared: CUDA error: out of memory"):
        await update(make("ipc"), server, weights)
    assert server.paths[-2:] == [END, RESUME]


async def test_a_clean_up_error_is_logged_and_does_not_hide_the_error_of_the_update(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> dict[str, torch.Tensor]:
        raise UpdateRefused("a part of the weights cannot be copied to cuda:1")

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(ipc_transport, "_stage", refuse)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "ipc_collect", fail)
    with capture_logs() as logged, pytest.raises(WeightsRefused, match="cannot be copied to cuda:1"):
        await update(make("ipc", device="cuda:1"), server, weights)
    assert server.paths[-2:] == [END, RESUME]
    (line,) = (line for line in logged if line["event"] == "weights.buckets_not_freed")
    assert (line["device"], line["cause"]) == ("cuda:1", "CUDA error: an illegal memory access was encountered")
