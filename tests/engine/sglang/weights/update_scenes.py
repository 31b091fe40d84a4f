"""Updates of a fake server, for the tests of all transports."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import EngineFailure, WeightsRefused
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.weights import WeightTransport
from tests.engine.closeness import assert_close
from tests.engine.sglang.weights.fake_weight_server import UPDATES, FakeWeightServer
from tests.engine.tiny_models import small_model
from tests.engine.whole_publisher import WholePublisher

SMALL_BUCKET = 8 * 2**10  # in bytes; the small model needs several buckets
TRANSPORTS = tuple(UPDATES)
PAUSE, RESUME = "/pause_generation", "/continue_generation"
BEGIN, END = "/begin_weight_update", "/end_weight_update"

Make = Callable[..., WeightTransport]


def publish(folder: Path, dtype: torch.dtype) -> WeightsPublished:
    return WholePublisher(folder, dtype).publish(7, dict(small_model(seed=7).named_parameters()))


def assert_all_loaded(server: FakeWeightServer, dtype: torch.dtype = torch.float32) -> None:
    published = dict(small_model(seed=7).named_parameters())
    assert {tensor.dtype for tensor in server.loaded.values()} == {dtype}
    loaded = {name: tensor.float() for name, tensor in server.loaded.items()}
    assert_close(loaded, {name: tensor.to(dtype).float() for name, tensor in published.items()}, rtol=0, atol=0)
    assert server.weight_version == "7"


@asynccontextmanager
async def connected(server: FakeWeightServer, transport: WeightTransport) -> AsyncGenerator[SGLangClient]:
    async with server.serving() as url, SGLangClient(url) as client:
        try:
            yield client
        finally:
            await transport.close()
            server.groups.clear()  # this ends pending collectives


async def update(transport: WeightTransport, server: FakeWeightServer, *versions: WeightsPublished) -> None:
    async with connected(server, transport) as client:
        for version in versions:
            await transport.update(client, version)


async def assert_update_breaks(
    transport: WeightTransport, server: FakeWeightServer, weights: WeightsPublished, message: str
) -> None:
    """Check that an update fails and requests stay paused. The engine must then restart its server."""
    with pytest.raises(EngineFailure, match=message) as failure:
        await update(transport, server, weights)
    assert not isinstance(failure.value, WeightsRefused)
    assert RESUME not in server.paths
