"""Tests: a server receives the base once, and then A and B under a new name for each version."""

import asyncio
import base64
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from msgspec.structs import replace
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import EngineFailure, WeightsRefused
from asterism.engine.learner.adapters.adapter_publisher import AdapterPublisher
from asterism.engine.model.lora_linear import list_adapter_parameters, list_base_parameters
from asterism.engine.model.lora_options import LoraOptions
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.weights.adapters import AdapterTransport, complete_stacks
from asterism.engine.weight_transfer.adapter_slots import read_base
from tests.engine.learner.adapters.adapted_models import OPTIONS, adapted_model, fill_adapters
from tests.engine.sglang.fake_server import FakeServer, refusing
from tests.engine.sglang.scenes import FakeTransport
from tests.engine.whole_publisher import publish

pytestmark = pytest.mark.real_clock
LOAD, UNLOAD, FLUSH = "/load_lora_adapter_from_tensors", "/unload_lora_adapter", "/flush_cache"
PEFT = "base_model.model."


class BaseTransport(FakeTransport):
    """A transport that records the bases it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[WeightsPublished] = []

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        self.sent.append(weights)


class AdapterServer(FakeServer):
    """A server that stores the names of its adapters."""

    def __init__(self, tp_size: int = 1) -> None:
        super().__init__()
        self.info["tp_size"] = tp_size
        self.adapters = ["of another client"]
        self.handlers |= {LOAD: self._load, UNLOAD: self._unload}

    async def _load(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.adapters.append(body["lora_name"])
        return self._respond()

    async def _unload(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.adapters.remove(body["lora_name"])
        return self._respond()

    def _respond(self) -> web.StreamResponse:
        return web.json_response({"success": True, "loaded_adapters": dict.fromkeys(self.adapters, "__tensor__")})


class Sending:
    """A learner with adapters, an AdapterTransport and a server."""

    def __init__(
        self, folder: Path, server: FakeServer, options: LoraOptions = OPTIONS, dtype: torch.dtype = torch.float32
    ) -> None:
        self.model, self.server, self.whole = adapted_model(options=options), server, BaseTransport()
        self.publisher = AdapterPublisher(folder, self.model, dtype)
        self.transport = AdapterTransport(self.whole, list_base_parameters(self.model), options, dtype)
        self.ended_after: list[int] = []  # number of requests that the server had received at each call of end_requests

    def publish(self, version: int) -> WeightsPublished:
        return publish(self.publisher, version)

    async def update(self, *versions: WeightsPublished, before_each: Callable[[], None] = lambda: None) -> list[str]:
        names: list[str] = []
        async with self.server.serving() as url, SGLangClient(url) as client:
            for weights in versions:
                before_each()
                names.append(await self.transport.update(client, weights, self._end_requests))
        return names

    async def _end_requests(self) -> None:
        self.ended_after.append(len(self.server.requests))


def unpack(payload: str) -> dict[str, Tensor]:
    return pickle.loads(base64.b64decode(payload))


async def test_the_base_is_sent_once_and_each_version_has_its_own_name(tmp_path: Path) -> None:
    server = AdapterServer()
    sending = Sending(tmp_path, server)
    first, second = sending.publish(1), sending.publish(2)
    names = await sending.update(first, second)
    assert sending.whole.sent == [read_base(first).locate(first)]
    assert [name.rsplit("-", 1)[0] for name in names] == ["asterism-1", "asterism-2"]
    assert server.adapters == ["of another client", names[1]]
    paths = [path for path, _ in server.requests if path != "/server_info"]
    assert paths == [LOAD, "/continue_generation", FLUSH, LOAD, "/continue_generation", UNLOAD, FLUSH]
    # Requests end before the base is sent, and in each version between load and unload.
    assert [server.requests[count - 1][0] for count in sending.ended_after[1:]] == ["/continue_generation"] * 2
    assert sending.ended_after[0] == 0


async def test_the_base_is_sent_again_if_the_server_lost_it_or_it_has_changed(tmp_path: Path) -> None:
    sending = Sending(tmp_path / "one", AdapterServer())
    weights = sending.publish(1)
    await sending.update(weights, weights, before_each=sending.transport.forget_base)
    assert len(sending.whole.sent) == 2
    other = Sending(tmp_path / "other", sending.server)
    with torch.no_grad():
        list_base_parameters(other.model)["model.norm.weight"] += 1.0
    await sending.update(other.publish(2))
    assert len({base.digest for base in sending.whole.sent}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [OPTIONS.targets, ("k_proj",), ("up_proj", "o_proj")])
async def test_a_server_receives_complete_stacks_with_checksums_in_its_dtype(
    tmp_path: Path, targets: Any, dtype: torch.dtype
) -> None:
    sending = Sending(tmp_path, AdapterServer(tp_size=2), OPTIONS._replace(targets=targets), dtype)
    fill_adapters(sending.model)
    await sending.update(sending.publish(1))
    (body,) = sending.server.get_bodies(LOAD)
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 12.0, "target_modules": list(complete_stacks(targets))}
    assert body["config_dict"] == config
    mine, of_other_rank = map(unpack, body["serialized_named_tensors"])
    assert mine.keys() == of_other_rank.keys() == body["expected_checksums"].keys()
    expected = {f"{PEFT}{name}": each.detach() for name, each in list_adapter_parameters(sending.model).items()}
    assert expected.keys() <= mine.keys()
    for name, tensor in mine.items():
        content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(content).hexdigest() == body["expected_checksums"][name]
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert torch.equal(tensor, expected.get(name, torch.zeros(tensor.shape)).to(dtype))
    projections = {name.split(".")[-3] for name in mine}
    assert projections == set(complete_stacks(targets))


def test_only_stacked_projections_are_completed() -> None:
    assert complete_stacks(("v_proj", "o_proj")) == ("v_proj", "o_proj", "q_proj", "k_proj")
    assert complete_stacks(("gate_proj",)) == ("gate_proj", "up_proj")
    assert complete_stacks(("o_proj", "down_proj")) == ("o_proj", "down_proj")


@pytest.mark.parametrize("status", [400, 500])
async def test_refused_adapters_leave_the_earlier_ones_and_running_requests(tmp_path: Path, status: int) -> None:
    server = AdapterServer()
    sending = Sending(tmp_path, server)
    (name,) = await sending.update(sending.publish(1))
    server.handlers[LOAD] = refusing(
        status, {"success": False, "error_message": "rank 3 is incompatible", "error": "no"}
    )
    with pytest.raises(WeightsRefused, match=r"the server refused the adapters of version 2: .*(incompatible|500 no)"):
        await sending.update(sending.publish(2))
    assert (server.adapters, len(sending.ended_after)) == (["of another client", name], 2)


async def test_a_failed_unload_of_an_adapter_breaks_the_engine(tmp_path: Path) -> None:
    server = AdapterServer()
    sending = Sending(tmp_path, server)
    server.handlers[UNLOAD] = refusing(400, {"success": False, "error_message": "stuck"})
    with pytest.raises(EngineFailure, match="/unload_lora_adapter: stuck") as failure:
        await sending.update(sending.publish(1), sending.publish(2))
    assert not isinstance(failure.value, WeightsRefused)


async def test_damaged_adapters_and_a_missing_base_are_refused_before_any_request(tmp_path: Path) -> None:
    sending = Sending(tmp_path, AdapterServer())
    weights = sending.publish(1)
    with pytest.raises(WeightsRefused):
        await sending.update(replace(weights, digest="0" * 32))
    with pytest.raises(WeightsRefused):
        await sending.update(replace(weights, num_bytes=weights.num_bytes + 64))
    assert (sending.server.requests, sending.whole.sent, sending.ended_after) == ([], [], [])


async def test_closing_also_closes_the_transport_of_the_base(tmp_path: Path) -> None:
    sending, closed = Sending(tmp_path, AdapterServer()), asyncio.Event()

    async def close() -> None:
        closed.set()

    sending.whole.close = close
    await sending.transport.close()
    assert closed.is_set()
