"""The SGLang engine: aborts, pauses, weight updates, memory release, and its counters."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bus.messages import WeightsPublished
from engine.contract import EngineFailure, WeightsRefused
from engine.sglang.sglang_engine import SGLangEngine
from tests.engine.sglang.fake_server import ABORTED, LENGTH, FakeServer, make_response, streaming
from tests.engine.sglang.scenes import (
    FakeServerHandle,
    FakeTransport,
    make_full_response,
    make_request,
    run_scene,
    wait_for_tokens,
)

PUBLISHED = WeightsPublished(5, "/weights", 4, "d" * 32)


def test_an_abort_returns_the_tokens_of_the_servers_last_response(model: Path):
    server = FakeServer()
    one, two = (lambda body: make_response(body, [4])), (lambda body: make_response(body, [4, 5], ABORTED))
    server.generations.append(streaming(one, server.abort_received, two))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        call = asyncio.ensure_future(engine.generate(make_request()))
        await wait_for_tokens(engine, 1)
        engine.abort(1)
        generation = await call
        assert (generation.token_ids.tolist(), generation.finish) == ([4, 5], "abort")

    run_scene(model, server, scene)
    [abort], [body] = server.get_bodies("/abort_request"), server.get_bodies("/generate")
    assert abort == {"rid": body["rid"]}


def test_an_abort_without_a_response_returns_the_tokens_so_far(model: Path):
    server = FakeServer(streaming(lambda body: make_response(body, [4, 5]), then="silent"))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        call = asyncio.ensure_future(engine.generate(make_request()))
        await wait_for_tokens(engine, 2)
        engine.abort(1)
        generation = await call
        assert (generation.token_ids.tolist(), generation.finish) == ([4, 5], "abort")
        engine.abort(1)  # nothing is pending

    run_scene(model, server, scene, abort_timeout_s=0.0)


def test_an_abort_before_the_first_token_closes_the_stream(model: Path):
    """A server ignores the abort of a request that has not reached its scheduler."""
    server = FakeServer(streaming(then="silent"))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        call = asyncio.ensure_future(engine.generate(make_request()))
        await server.generation_received.wait()
        engine.abort(1)
        assert (await call).finish == "abort"

    run_scene(model, server, scene)
    assert server.get_bodies("/abort_request") == []


def test_while_paused_turns_wait_in_the_engine(model: Path):
    server = FakeServer(streaming(make_full_response))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.pause()
        waiting, aborted = (asyncio.ensure_future(engine.generate(make_request(number))) for number in (1, 2))
        await asyncio.sleep(0)
        assert (engine.get_load().waiting, server.get_bodies("/generate")) == (2, [])
        engine.abort(2)
        assert (await aborted).finish == "abort"
        await engine.resume()
        assert (await waiting).token_ids.tolist() == [4, 5, 6]

    run_scene(model, server, scene)
    assert server.get_bodies("/pause_generation") == [{"mode": "in_place"}]
    assert len(server.get_bodies("/generate")) == 1


def test_a_refused_pause_leaves_the_engine_running(model: Path):
    server = FakeServer(streaming(make_full_response))
    server.accepts_pause = False

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        with pytest.raises(EngineFailure, match="500 not now"):
            await engine.pause()
        assert (await engine.generate(make_request())).finish == "length"

    run_scene(model, server, scene)


def test_loading_weights_while_paused_leaves_the_engine_paused(model: Path):
    server = FakeServer(streaming(lambda body: make_response(body, [4], LENGTH, versions=[("5", 0, 1)])))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.pause()
        await engine.load_weights(PUBLISHED)
        waiting = asyncio.ensure_future(engine.generate(make_request(new_tokens=1)))
        await asyncio.sleep(0)
        assert engine.get_load().waiting == 1
        await engine.resume()
        assert (await waiting).versions.tolist() == [5]

    run_scene(model, server, scene)
    # Twice, because the transport resumes after loading.
    assert server.get_bodies("/pause_generation") == [{"mode": "in_place"}] * 2


def test_new_weights_change_the_cache_key_of_later_turns(model: Path):
    server = FakeServer(streaming(lambda body: make_response(body, [4], LENGTH, versions=[("5", 0, 1)])))

    async def scene(engine: SGLangEngine, _: FakeServerHandle, transport: FakeTransport) -> None:
        transport.may_finish.clear()
        loading = asyncio.ensure_future(engine.load_weights(PUBLISHED))
        await transport.update_started.wait()
        meanwhile = asyncio.ensure_future(engine.generate(make_request(new_tokens=1)))
        await asyncio.sleep(0)
        assert (engine.version, server.get_bodies("/generate")) == (2, [])
        transport.may_finish.set()
        await loading
        assert engine.version == 5
        assert (await meanwhile).versions.tolist() == [5]

    run_scene(model, server, scene)
    assert [body["extra_key"] for body in server.get_bodies("/generate")] == ["5-" + "d" * 32]


def test_refused_weights_leave_the_engine_unchanged(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        with pytest.raises(WeightsRefused):
            await engine.load_weights(PUBLISHED)
        assert engine.version == 2
        assert (await engine.generate(make_request())).versions.tolist() == [2, 2, 2]

    run_scene(model, FakeServer(streaming(make_full_response)), scene, WeightsRefused("damaged"))


def test_partially_loaded_weights_fail_the_engine(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        with pytest.raises(EngineFailure):
            await engine.load_weights(PUBLISHED)
        with pytest.raises(EngineFailure, match="the server's weights are incomplete: half of them"):
            await engine.generate(make_request())

    run_scene(model, FakeServer(streaming(make_full_response)), scene, EngineFailure("half of them"))


def test_an_evicted_prefix_is_counted_and_logged_once(model: Path):
    server = FakeServer(
        streaming(make_full_response), streaming(lambda body: make_response(body, [4, 5, 6], LENGTH, cached_tokens=2))
    )

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.generate(make_request())
        # The last of the six tokens is not in the cache.
        assert engine.get_load().cached_tokens == 5
        await engine.generate(make_request(1, 1, 2, 3, 4, 5, 6, 8))
        load = engine.get_load()
        assert (load.prefilled_tokens, load.recomputed_tokens, load.evicted_tokens) == (3 + 5, 3, 3)

    lines = [line for line in run_scene(model, server, scene) if line["event"] == "engine.evicted"]
    assert [(line["had_tokens"], line["cached_tokens"]) for line in lines] == [(5, 2)]


def test_a_released_prefix_is_counted_as_recomputed_but_not_as_evicted(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.generate(make_request())
        engine.release_cache(1)
        await engine.generate(make_request(1, 1, 2, 3, 4, 5, 6, 8))
        assert (engine.get_load().recomputed_tokens, engine.get_load().evicted_tokens) == (5, 0)

    assert [
        line
        for line in run_scene(model, FakeServer(streaming(make_full_response)), scene)
        if line["event"] == "engine.evicted"
    ] == []


def test_a_retraction_is_counted_and_logged_once(model: Path):
    server = FakeServer(
        streaming(
            lambda body: make_response(body, [4]),
            lambda body: make_response(body, [4, 5], num_retractions=1),
            lambda body: make_response(body, [4, 5, 6], LENGTH, num_retractions=1),
        )
    )

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.generate(make_request())
        load = engine.get_load()
        assert (load.preempted, load.generated_tokens, load.recomputed_tokens) == (1, 3, 5)

    lines = [line for line in run_scene(model, server, scene) if line["event"] == "engine.retracted"]
    assert [(line["trajectory_id"], line["tokens"]) for line in lines] == [(1, 5)]


MEMORY = ("/flush_cache", "/pause_generation", "/release_memory_occupation", "/resume_memory_occupation")


def test_memory_is_released_by_an_idle_server_and_resumed_around_the_weights(model: Path):
    """A server crashes if it is busy, or if memory to resume was not released."""
    server = FakeServer(streaming(lambda body: make_response(body, [4], LENGTH, versions=[("5", 0, 1)])))

    async def scene(engine: SGLangEngine, _: FakeServerHandle, transport: FakeTransport) -> None:
        await engine.sleep()
        await engine.sleep()
        transport.may_finish.clear()
        loading = asyncio.ensure_future(engine.load_weights(PUBLISHED))
        await transport.update_started.wait()
        assert server.get_bodies("/resume_memory_occupation") == [{"tags": ["weights"]}]
        transport.may_finish.set()
        await loading
        assert (await engine.generate(make_request(new_tokens=1))).versions.tolist() == [5]
        await engine.load_weights(PUBLISHED)

    lines = run_scene(model, server, scene)
    assert [(path, body.get("tags")) for path, body in server.requests if path in MEMORY] == [
        ("/flush_cache", None),
        ("/pause_generation", None),
        ("/release_memory_occupation", ["kv_cache", "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["kv_cache"]),
    ]
    assert [line["event"] for line in lines if "memory" in line["event"]] == [
        "memory.released",
        *["memory.resumed"] * 2,
    ]


def test_a_server_that_stays_busy_keeps_its_memory(model: Path):
    server = FakeServer(streaming(make_full_response))
    server.idle = False

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        with pytest.raises(EngineFailure, match="the server was not idle within 60 s"):
            await engine.sleep()
        assert (await engine.generate(make_request())).finish == "length"

    run_scene(model, server, scene)
    assert server.get_bodies("/release_memory_occupation") == []


def test_refused_weights_leave_the_other_memory_released(model: Path):
    server = FakeServer(streaming(make_full_response))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.sleep()
        with pytest.raises(WeightsRefused):
            await engine.load_weights(PUBLISHED)
        waiting = asyncio.ensure_future(engine.generate(make_request()))
        await asyncio.sleep(0)
        assert (engine.get_load().waiting, server.get_bodies("/generate")) == (1, [])
        engine.abort(1)
        await waiting
        await engine.sleep()

    run_scene(model, server, scene, WeightsRefused("damaged"))
    released = [body["tags"] for body in server.get_bodies("/release_memory_occupation")]
    assert released == [["kv_cache", "weights"], ["weights"]]
