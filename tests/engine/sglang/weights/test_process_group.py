"""Tests of the transport by a process group that includes the ranks of a server."""

import asyncio
from typing import Any

import pytest
import torch
from aiohttp import web

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import WeightsRefused
from asterism.engine.sglang.weights.transports import ProcessGroupTransport
from tests.engine.sglang.fake_server import silent
from tests.engine.sglang.weights.fake_weight_server import UPDATES, FakeWeightServer, UpdateError
from tests.engine.sglang.weights.update_scenes import PAUSE, RESUME, Make, assert_update_breaks, connected, update

pytestmark = [pytest.mark.real_clock, pytest.mark.slow]


async def test_a_process_group_is_created_once_and_reused(
    make: Make, server: FakeWeightServer, weights: WeightsPublished
) -> None:
    await update(make("group"), server, weights, weights)
    assert server.paths.count("/init_weights_update_group") == 1


async def test_a_broadcast_ends_when_the_server_leaves_the_group(
    make: Make, server: FakeWeightServer, weights: WeightsPublished
) -> None:
    receive = server.handlers[UPDATES["group"]]

    async def leave_first(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        server.groups.clear()
        return await receive(request, body)

    server.handlers[UPDATES["group"]] = leave_first
    with pytest.raises(WeightsRefused, match="Failed to receive weights"):
        await update(make("group"), server, weights)
    assert server.paths[-2:] == [RESUME, "/destroy_weights_update_group"]


async def test_a_refused_group_is_discarded(make: Make, server: FakeWeightServer, weights: WeightsPublished) -> None:
    transport = make("group", timeout_s=0.5)
    server.refusals["/init_weights_update_group"] = "Failed to initialize custom process group: no route"
    with pytest.raises(WeightsRefused, match=r"could not create a process group with the server: .*no route"):
        await update(transport, server, weights)
    assert isinstance(transport, ProcessGroupTransport)
    assert transport.group is None
    assert PAUSE not in server.paths


@pytest.mark.slow
async def test_an_unresponsive_server_fails_the_broadcast(
    make: Make, server: FakeWeightServer, weights: WeightsPublished
) -> None:
    server.handlers[UPDATES["group"]] = silent
    transport = make("group", bucket=1 << 30, timeout_s=0.5)
    message = r"the server does not respond; local error: .*([Tt]imed out|timeout)"
    await assert_update_breaks(transport, server, weights, message)


async def test_a_cancelled_update_ends_the_broadcast_on_the_server(
    make: Make, server: FakeWeightServer, weights: WeightsPublished
) -> None:
    transport = make("group")
    receiving = asyncio.Queue[asyncio.Future[list[torch.Tensor]]]()

    async def receive_more(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Wait for one tensor more than the engine sends."""
        shapes = [(shape, torch.float32) for shape in (*body["shapes"], [1])]
        receiving.put_nowait(asyncio.ensure_future(server.receive(shapes, body["group_name"])))
        return await silent(request, body)

    server.handlers[UPDATES["group"]] = receive_more
    async with connected(server, transport) as client:
        updating = asyncio.ensure_future(transport.update(client, weights))
        broadcast = await receiving.get()
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        with pytest.raises(UpdateError):
            await broadcast
