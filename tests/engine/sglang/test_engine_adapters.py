"""Tests of the SGLang engine with adapters: turns name an adapter, and continue with a newer adapter."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import EngineFailure, WeightsRefused
from asterism.engine.model.lora_options import LoraOptions
from asterism.engine.sglang import generate
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.weights.adapters import AdapterTransport
from tests.engine.sglang.fake_server import ABORTED, LENGTH, FakeServer, make_response, streaming
from tests.engine.sglang.scenes import FakeTransport, make_request, running_engine, wait_for_tokens

pytestmark = pytest.mark.real_clock


class NamedAdapters(AdapterTransport):
    """A transport that names each version without sending it. Then it ends the requests, or fails."""

    def __init__(self) -> None:
        super().__init__(FakeTransport(), {}, LoraOptions(1, 1.0, ()), dtype=None)  # pyright: ignore[reportArgumentType]
        self.failure: EngineFailure | None = None
        self.num_forgotten = 0

    async def update(
        self, client: SGLangClient, weights: WeightsPublished, end_requests: Callable[[], Awaitable[None]]
    ) -> str:
        if self.failure is not None:
            raise self.failure
        await end_requests()
        return f"adapter-{weights.version}"

    def forget_base(self) -> None:
        self.num_forgotten += 1


def version(number: int) -> WeightsPublished:
    return WeightsPublished(number, "/weights", 4, f"{number}" * 32)


def abort_after(*token_ids: int, aborted: asyncio.Event, finish: dict[str, Any] = ABORTED) -> Any:
    """Return a stream of these tokens. It waits after the first token until the server aborts its requests."""
    return streaming(
        lambda body: make_response(body, token_ids[:1]), aborted, lambda body: make_response(body, token_ids, finish)
    )


def make_server(*generations: Any) -> tuple[FakeServer, asyncio.Event]:
    """Return a server, and an event that its next abort sets."""
    aborted = asyncio.Event()

    async def abort(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        aborted.set()
        return web.Response()

    server = FakeServer(*generations)
    server.handlers["/abort_request"] = abort
    return server, aborted


def finish(*token_ids: int) -> Any:
    return streaming(lambda body: make_response(body, token_ids, LENGTH))


async def test_requests_name_the_newest_adapter_and_tokens_have_its_version(model: Path) -> None:
    server = FakeServer(finish(4, 5, 6))
    async with running_engine(model, server, NamedAdapters()) as engine:
        assert (await engine.generate(make_request())).versions.tolist() == [2, 2, 2]  # the server has this version
        for number in (3, 7):
            await engine.load_weights(version(number))
            assert (await engine.generate(make_request())).versions.tolist() == [number] * 3
            assert engine.version == number
    bodies = server.get_bodies("/generate")
    assert [body.get("lora_path") for body in bodies] == [None, "adapter-3", "adapter-7"]
    assert len({body.get("extra_key") for body in bodies}) == 3


async def test_a_running_turn_keeps_its_tokens_and_continues_with_the_new_adapter(model: Path) -> None:
    server, aborted = make_server(finish(9, 9, 9))
    server.generations = [abort_after(4, 5, aborted=aborted), finish(6)]
    async with running_engine(model, server, NamedAdapters()) as engine:
        await engine.load_weights(version(3))
        aborted.clear()
        call = asyncio.ensure_future(engine.generate(make_request()))
        await wait_for_tokens(engine, 1)
        await engine.load_weights(version(4))
        generation = await call
        assert (generation.token_ids.tolist(), generation.versions.tolist()) == ([4, 5, 6], [3, 3, 4])
        assert generation.finish == "length"
    assert server.get_bodies("/abort_request") == [{"abort_all": True}]
    first, second = server.get_bodies("/generate")
    assert (second["input_ids"], second["lora_path"]) == ([*first["input_ids"], 4, 5], "adapter-4")
    assert second["sampling_params"]["sampling_seed"] == first["sampling_params"]["sampling_seed"]


async def test_a_request_without_tokens_is_cancelled_and_sent_again(model: Path) -> None:
    """The request could still wait in the client, where an abort by the server does not reach it."""
    server, _ = make_server(streaming(then="silent"), finish(4, 5, 6))
    async with running_engine(model, server, NamedAdapters()) as engine:
        call = asyncio.ensure_future(engine.generate(make_request()))
        await server.generation_received.wait()
        await engine.load_weights(version(3))
        assert (await call).versions.tolist() == [3, 3, 3]


@pytest.mark.slow
async def test_a_request_that_the_server_does_not_abort_is_closed_after_the_timeout(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "ABORT_TIMEOUT_S", 0.05)
    server, _ = make_server(streaming(lambda body: make_response(body, [4]), then="silent"), finish(5, 6))
    async with running_engine(model, server, NamedAdapters()) as engine:
        call = asyncio.ensure_future(engine.generate(make_request()))
        await wait_for_tokens(engine, 1)
        await engine.load_weights(version(3))
        generation = await call
        assert (generation.token_ids.tolist(), generation.versions.tolist()) == ([4, 5, 6], [2, 3, 3])


async def test_a_turn_that_ends_or_is_aborted_during_the_update_is_not_sent_again(model: Path) -> None:
    server, aborted = make_server()
    server.generations = [abort_after(4, 5, 6, aborted=aborted, finish=LENGTH), abort_after(7, 8, aborted=aborted)]
    async with running_engine(model, server, NamedAdapters()) as engine:
        ending = asyncio.ensure_future(engine.generate(make_request(1)))
        await wait_for_tokens(engine, 1)
        stopped = asyncio.ensure_future(engine.generate(make_request(2)))
        await wait_for_tokens(engine, 2)
        loading = asyncio.ensure_future(engine.load_weights(version(3)))
        await asyncio.sleep(0)
        engine.abort(2)
        await loading
        assert ((await ending).token_ids.tolist(), (await stopped).finish) == ([4, 5, 6], "abort")
    assert len(server.get_bodies("/generate")) == 2


async def test_refused_adapters_leave_turns_running_with_the_earlier_adapter(model: Path) -> None:
    server, aborted = make_server()
    server.generations = [abort_after(4, 5, 6, aborted=aborted, finish=LENGTH)]
    transport = NamedAdapters()
    async with running_engine(model, server, transport) as engine:
        await engine.load_weights(version(3))
        call = asyncio.ensure_future(engine.generate(make_request()))
        await wait_for_tokens(engine, 1)
        transport.failure = WeightsRefused("damaged")
        with pytest.raises(WeightsRefused):
            await engine.load_weights(version(4))
        aborted.set()
        assert (await call).versions.tolist() == [3, 3, 3]
        assert engine.version == 3
    assert server.get_bodies("/abort_request") == []


async def test_a_server_that_released_its_memory_needs_the_base_again(model: Path) -> None:
    server, transport = FakeServer(finish(4, 5, 6)), NamedAdapters()
    async with running_engine(model, server, transport) as engine:
        await engine.load_weights(version(3))
        assert transport.num_forgotten == 0
        await engine.sleep()
        await engine.sleep()
        assert transport.num_forgotten == 1
        await engine.load_weights(version(4))
        assert (await engine.generate(make_request())).versions.tolist() == [4, 4, 4]
