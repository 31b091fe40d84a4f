"""Tests of the behaviour that all transports share: pauses, refusals, buckets and checksums."""

from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from msgspec.structs import replace

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import WeightsRefused
from asterism.engine.sglang.weights import build_extra_key
from asterism.engine.sglang.weights.transports import split_into_buckets
from asterism.engine.weight_transfer.shared_memory import open_published
from asterism.engine.weight_transfer.weight_layout import load_layout
from tests.engine.sglang.fake_server import refusing
from tests.engine.sglang.weights.fake_weight_server import UPDATES, FakeWeightServer
from tests.engine.sglang.weights.update_scenes import (
    BEGIN,
    END,
    PAUSE,
    RESUME,
    TRANSPORTS,
    Make,
    assert_all_loaded,
    assert_update_breaks,
    connected,
    publish,
    update,
)
from tests.engine.tiny_models import save_small_model, small_config, small_model
from tests.engine.whole_publisher import WholePublisher

pytestmark = [pytest.mark.real_clock, pytest.mark.slow]


@pytest.mark.parametrize(("dtype", "has_paused_requests"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("name", TRANSPORTS)
async def test_a_paused_server_receives_all_parameters_in_its_dtype(
    make: Make, server: FakeWeightServer, tmp_path: Path, name: str, dtype: torch.dtype, has_paused_requests: bool
) -> None:
    if has_paused_requests:
        server.handlers["/flush_cache"] = refusing(400, "Timed out waiting for idle state.")
    await update(make(name, dtype), server, publish(tmp_path, dtype))
    assert_all_loaded(server, dtype)
    during = [path for path in server.paths if path != "/init_weights_update_group"]
    assert during[0] == PAUSE
    assert during[-2:] == ["/flush_cache", RESUME]
    assert UPDATES[name] in during[1:-2]


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_after_a_refused_update_requests_resume_and_the_next_update_succeeds(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, name: str
) -> None:
    transport = make(name)
    server.refusals[UPDATES[name]] = "weight splits are active"
    async with connected(server, transport) as client:
        with pytest.raises(WeightsRefused, match=r"version 7: .*weight splits are active"):
            await transport.update(client, weights)
        assert server.paths.index(RESUME) > server.paths.index(UPDATES[name])
        assert server.paths.count(BEGIN) == server.paths.count(END)
        await transport.update(client, weights)
    assert_all_loaded(server)


@pytest.mark.parametrize(
    ("name", "message"),
    [("disk", "Failed to update weights: x.\nRolling back to original weights."), ("group", "x. partially updated.")],
)
async def test_requests_stay_paused_after_a_partial_write_of_weights(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, name: str, message: str
) -> None:
    server.refusals[UPDATES[name]] = message
    await assert_update_breaks(make(name), server, weights, "partially loaded")


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("message", ["reports version 6 after an update to 7", r"sglang-0 lacks model\."])
async def test_an_update_fails_if_the_server_reports_another_version_or_lacks_a_published_parameter(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, name: str, message: str
) -> None:
    if "version" in message:
        server.handlers["/model_info"] = refusing(200, {"model_path": "/model", "weight_version": "6"})
    else:
        server.info["quantization"] = None  # the server's checksums are compared; it sends none
    await assert_update_breaks(make(name), server, weights, message)


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_requests_stay_paused_after_a_wrong_checksum(make: Make, weights: WeightsPublished, name: str) -> None:
    server = FakeWeightServer()

    async def change_weight(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        server.loaded["model.layers.0.self_attn.k_proj.weight"][-1, -1] += 1.0
        return await server.compute_checksum(request, body)

    for _ in range(2):
        await update(make(name), FakeWeightServer(), weights)
    server.handlers["/weights_checker"] = change_weight
    await assert_update_breaks(make(name), server, weights, "the same version 7 but hold different weights")


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_unreadable_weights_are_refused_before_any_pause(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, name: str
) -> None:
    with pytest.raises(WeightsRefused, match="holds other weights of version 7, or is damaged"):
        await update(make(name), server, replace(weights, digest="00" * 16))
    assert server.paths == []


@pytest.mark.parametrize("name", ["tensor", "group", "ipc"])
async def test_an_open_earlier_update_is_closed_first(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, name: str
) -> None:
    transport = make(name)
    async with connected(server, transport) as client:
        await client.begin_update()
        await transport.update(client, weights)
    assert_all_loaded(server)
    assert [path for path in server.paths if path in (BEGIN, END)] == [BEGIN, BEGIN, END, BEGIN, END]


@pytest.mark.parametrize("name", ["tensor", "group", "ipc"])
async def test_requests_stay_paused_after_a_refused_second_bucket(
    make: Make, server: FakeWeightServer, weights: WeightsPublished, name: str
) -> None:
    path = UPDATES[name]
    load = server.handlers[path]

    async def refuse_second(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if server.paths.count(path) > 1:
            server.refusals[path] = "out of memory"
        return await load(request, body)

    server.handlers[path] = refuse_second
    await assert_update_breaks(make(name), server, weights, r"partially loaded: .*out of memory")
    assert server.weight_version == "default"


@pytest.mark.parametrize("name", ["tensor", "ipc"])
async def test_each_tensor_parallel_rank_gets_its_own_payload(make: Make, weights: WeightsPublished, name: str) -> None:
    server = FakeWeightServer(tp_size=2)
    await update(make(name), server, weights)
    assert_all_loaded(server)


def test_buckets_contain_all_parameters_in_order_within_the_size_limit() -> None:
    parameters = {name: torch.zeros(size) for name, size in (("a", 2), ("b", 3), ("c", 9), ("d", 1), ("e", 4))}
    assert [list(bucket) for bucket in split_into_buckets(parameters, 20)] == [["a", "b"], ["c"], ["d", "e"]]


def test_only_untied_embeddings_are_published_with_an_output_head(tmp_path: Path) -> None:
    for tied in (True, False):
        model = small_model(config=small_config(tie_word_embeddings=tied))
        folder = save_small_model(tmp_path, model)
        published = WholePublisher(tmp_path / f"{tied}").publish(1, dict(model.named_parameters()))
        with open_published(published, load_layout(folder, torch.float32)) as views:
            assert ("lm_head.weight" in views) is not tied


def test_the_cache_key_depends_on_version_and_digest(weights: WeightsPublished) -> None:
    others = (replace(weights, version=8), replace(weights, digest="ab" * 16))
    assert len({build_extra_key(version) for version in (weights, *others)}) == 3
