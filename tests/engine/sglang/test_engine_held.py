"""Tests of the SGLang engine: failed aborts and pauses, released memory, evictions and retractions."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import EngineFailure, WeightsRefused
from tests.engine.sglang.fake_server import LENGTH, FakeServer, make_full_response, make_response, refusing, streaming
from tests.engine.sglang.scenes import FakeTransport, make_request, running_engine, wait_for_tokens

pytestmark = pytest.mark.real_clock
PUBLISHED = WeightsPublished(5, "/weights", 4, "d" * 32)


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_an_abort_without_a_response_returns_the_tokens_so_far(model: Path, num_tokens: int):
    """A server ignores the abort of a request that has not reached its scheduler. So before the first
    token, the engine only closes the stream."""
    begun = [lambda body: make_response(body, [4, 5])] if num_tokens else []
    server = FakeServer(streaming(*begun, then="silent"))
    async with running_engine(model, server, abort_timeout_s=0.0) as engine:
        call = asyncio.ensure_future(engine.generate(make_request()))
        await server.generation_received.wait()
        await wait_for_tokens(engine, num_tokens)
        engine.abort(1)
        generation = await call
        assert (generation.token_ids.tolist(), generation.finish) == ([4, 5][:num_tokens], "abort")
        engine.abort(1)  # no request is pending now
    if not num_tokens:
        assert server.get_bodies("/abort_request") == []


async def test_a_refused_pause_leaves_the_engine_running(model: Path):
    server = FakeServer(streaming(make_full_response))
    server.handlers["/pause_generation"] = refusing(500, {"error": {"message": "not now"}})
    async with running_engine(model, server) as engine:
        with pytest.raises(EngineFailure, match="500 not now"):
            await engine.pause()
        assert (await engine.generate(make_request())).finish == "length"


async def test_an_evicted_prefix_is_counted_and_logged_once(model: Path, log_entries: list[Any]):
    server = FakeServer(
        streaming(make_full_response), streaming(lambda body: make_response(body, [4, 5, 6], LENGTH, cached_tokens=2))
    )
    async with running_engine(model, server) as engine:
        await engine.generate(make_request())
        # The last of the six tokens is not in the cache.
        assert engine.get_load().cached_tokens == 5
        await engine.generate(make_request(1, 1, 2, 3, 4, 5, 6, 8))
        load = engine.get_load()
        assert (load.prefilled_tokens, load.recomputed_tokens, load.evicted_tokens) == (3 + 5, 3, 3)
    [line] = log_entries
    assert (line["event"], line["had_tokens"], line["cached_tokens"]) == ("engine.evicted", 5, 2)


async def test_a_retraction_is_counted_and_logged_once(model: Path, log_entries: list[Any]):
    responses = (
        lambda body: make_response(body, [4]),
        lambda body: make_response(body, [4, 5], num_retractions=1),
        lambda body: make_response(body, [4, 5, 6], LENGTH, num_retractions=1),
    )
    async with running_engine(model, FakeServer(streaming(*responses))) as engine:
        await engine.generate(make_request())
        load = engine.get_load()
        assert (load.preempted, load.generated_tokens, load.recomputed_tokens) == (1, 3, 5)
    [line] = log_entries
    assert (line["event"], line["trajectory_id"], line["tokens"]) == ("engine.retracted", 1, 5)


MEMORY = ("/flush_cache", "/pause_generation", "/release_memory_occupation", "/resume_memory_occupation")


async def test_an_idle_server_releases_memory_and_resumes_it_around_the_weights(model: Path, log_entries: list[Any]):
    """A busy server would crash, and so would a server that resumes memory which it has not released."""
    server = FakeServer(streaming(lambda body: make_response(body, [4], LENGTH, versions=[("5", 0, 1)])))
    transport = FakeTransport()
    async with running_engine(model, server, transport) as engine:
        await engine.sleep()
        await engine.sleep()
        transport.may_finish.clear()
        loading = asyncio.ensure_future(engine.load_weights(PUBLISHED))
        waiting = asyncio.ensure_future(engine.generate(make_request(new_tokens=1)))
        await transport.update_started.wait()
        assert server.get_bodies("/resume_memory_occupation") == [{"tags": ["weights"]}]
        assert (engine.version, server.get_bodies("/generate")) == (2, [])
        transport.may_finish.set()
        await loading
        assert (await waiting).versions.tolist() == [5]
        await engine.load_weights(PUBLISHED)
    assert [(path, body.get("tags")) for path, body in server.requests if path in MEMORY] == [
        ("/flush_cache", None),
        ("/pause_generation", None),
        ("/release_memory_occupation", ["kv_cache", "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["kv_cache"]),
    ]
    events = [line["event"] for line in log_entries if "memory" in line["event"]]
    assert events == ["memory.released", "memory.resumed", "memory.resumed"]


async def test_a_server_that_stays_busy_keeps_its_memory(model: Path):
    server = FakeServer(streaming(make_full_response))
    server.handlers["/flush_cache"] = refusing(400, "Timed out waiting for idle state.")
    async with running_engine(model, server) as engine:
        with pytest.raises(EngineFailure, match="the server was not idle within 60 s"):
            await engine.sleep()
        assert (await engine.generate(make_request())).finish == "length"
    assert server.get_bodies("/release_memory_occupation") == []


async def test_after_refused_weights_the_remaining_memory_stays_released(model: Path):
    server = FakeServer(streaming(make_full_response))
    async with running_engine(model, server, FakeTransport(WeightsRefused("damaged"))) as engine:
        await engine.sleep()
        with pytest.raises(WeightsRefused):
            await engine.load_weights(PUBLISHED)
        waiting = asyncio.ensure_future(engine.generate(make_request()))
        await asyncio.sleep(0)
        assert (engine.get_load().waiting, server.get_bodies("/generate")) == (1, [])
        engine.abort(1)
        await waiting
        await engine.sleep()
    released = [body["tags"] for body in server.get_bodies("/release_memory_occupation")]
    assert released == [["kv_cache", "weights"], ["weights"]]
