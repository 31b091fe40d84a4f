"""The SGLang engine while turns are aborted, held, or under other weights, and what it counts of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bus.messages import WeightsPublished
from engine.contract import EngineFailure, WeightsRefused
from engine.sglang.engine import SGLangEngine
from tests.engine.sglang.scenes import Attached, Way, request, serve, until_tokens, whole
from tests.engine.sglang.stand_in import ABORTED, LENGTH, StandIn, answer, streaming

PUBLISHED = WeightsPublished(5, "/weights", 4, "d" * 32)


def test_an_abort_tells_the_server_and_gives_what_it_answers(model: Path):
    server = StandIn()
    one, two = (lambda body: answer(body, [4])), (lambda body: answer(body, [4, 5], ABORTED))
    server.generations.append(streaming(one, server.told_to_abort, two))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        call = asyncio.ensure_future(engine.generate(request()))
        await until_tokens(engine, 1)
        engine.abort(1)
        generation = await call
        assert (generation.token_ids.tolist(), generation.finish) == ([4, 5], "abort")

    serve(model, server, scene)
    [told], [body] = server.bodies("/abort_request"), server.bodies("/generate")
    assert told == {"rid": body["rid"]}


def test_an_abort_that_the_server_does_not_answer_gives_what_has_come(model: Path):
    server = StandIn(streaming(lambda body: answer(body, [4, 5]), then="silent"))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        call = asyncio.ensure_future(engine.generate(request()))
        await until_tokens(engine, 2)
        engine.abort(1)
        generation = await call
        assert (generation.token_ids.tolist(), generation.finish) == ([4, 5], "abort")
        engine.abort(1)  # nothing is pending

    serve(model, server, scene, abort_s=0.0)


def test_an_abort_before_the_first_token_closes_the_stream(model: Path):
    """Told to abort a request that its scheduler does not have yet, a server forgets about it."""
    server = StandIn(streaming(then="silent"))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        call = asyncio.ensure_future(engine.generate(request()))
        await server.came.wait()
        engine.abort(1)
        assert (await call).finish == "abort"

    serve(model, server, scene)
    assert server.bodies("/abort_request") == []


def test_while_paused_turns_wait_on_this_side(model: Path):
    server = StandIn(streaming(whole))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.pause()
        held, aborted = (asyncio.ensure_future(engine.generate(request(number))) for number in (1, 2))
        await asyncio.sleep(0)
        assert (engine.load().waiting, server.bodies("/generate")) == (2, [])
        engine.abort(2)
        assert (await aborted).finish == "abort"
        await engine.resume()
        assert (await held).token_ids.tolist() == [4, 5, 6]

    serve(model, server, scene)
    assert server.bodies("/pause_generation") == [{"mode": "in_place"}]
    assert len(server.bodies("/generate")) == 1


def test_a_pause_that_the_server_refuses_is_none(model: Path):
    server = StandIn(streaming(whole))
    server.pauses = False

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        with pytest.raises(EngineFailure, match="500 not now"):
            await engine.pause()
        assert (await engine.generate(request())).finish == "length"

    serve(model, server, scene)


def test_weights_while_paused_leave_the_engine_paused(model: Path):
    server = StandIn(streaming(lambda body: answer(body, [4], LENGTH, versions=[("5", 0, 1)])))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.pause()
        await engine.load_weights(PUBLISHED)
        held = asyncio.ensure_future(engine.generate(request(new_tokens=1)))
        await asyncio.sleep(0)
        assert engine.load().waiting == 1
        await engine.resume()
        assert (await held).versions.tolist() == [5]

    serve(model, server, scene)
    assert server.bodies("/pause_generation") == [{"mode": "in_place"}] * 2  # a way resumes when it has loaded


def test_new_weights_give_turns_that_follow_a_cache_of_their_own(model: Path):
    server = StandIn(streaming(lambda body: answer(body, [4], LENGTH, versions=[("5", 0, 1)])))

    async def scene(engine: SGLangEngine, _: Attached, way: Way) -> None:
        way.go_on.clear()
        loading = asyncio.ensure_future(engine.load_weights(PUBLISHED))
        await way.begun.wait()
        meanwhile = asyncio.ensure_future(engine.generate(request(new_tokens=1)))
        await asyncio.sleep(0)
        assert (engine.version, server.bodies("/generate")) == (2, [])
        way.go_on.set()
        await loading
        assert engine.version == 5
        assert (await meanwhile).versions.tolist() == [5]

    serve(model, server, scene)
    assert [body["extra_key"] for body in server.bodies("/generate")] == ["5-" + "d" * 32]


def test_refused_weights_leave_the_engine_as_it_was(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        with pytest.raises(WeightsRefused):
            await engine.load_weights(PUBLISHED)
        assert engine.version == 2
        assert (await engine.generate(request())).versions.tolist() == [2, 2, 2]

    serve(model, StandIn(streaming(whole)), scene, WeightsRefused("damaged"))


def test_weights_that_are_not_whole_are_the_engines_end(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        with pytest.raises(EngineFailure):
            await engine.load_weights(PUBLISHED)
        with pytest.raises(EngineFailure, match="the server's weights are not whole: half of them"):
            await engine.generate(request())

    serve(model, StandIn(streaming(whole)), scene, EngineFailure("half of them"))


def test_a_prefix_that_is_gone_is_counted_and_said_once(model: Path):
    server = StandIn(streaming(whole), streaming(lambda body: answer(body, [4, 5, 6], LENGTH, cached_tokens=2)))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.generate(request())
        assert engine.load().cached_tokens == 5  # the last token of the six has not been computed
        await engine.generate(request(1, 1, 2, 3, 4, 5, 6, 8))
        load = engine.load()
        assert (load.prefilled_tokens, load.recomputed_tokens, load.evicted_tokens) == (3 + 5, 3, 3)

    lines = [line for line in serve(model, server, scene) if line["event"] == "engine.evicted"]
    assert [(line["had_tokens"], line["cached_tokens"]) for line in lines] == [(5, 2)]


def test_what_was_forgotten_is_computed_again_and_not_called_evicted(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.generate(request())
        engine.forget(1)
        await engine.generate(request(1, 1, 2, 3, 4, 5, 6, 8))
        assert (engine.load().recomputed_tokens, engine.load().evicted_tokens) == (5, 0)

    assert [line for line in serve(model, StandIn(streaming(whole)), scene) if line["event"] == "engine.evicted"] == []


def test_a_retraction_is_counted_and_said_once(model: Path):
    server = StandIn(
        streaming(
            lambda body: answer(body, [4]),
            lambda body: answer(body, [4, 5], num_retractions=1),
            lambda body: answer(body, [4, 5, 6], LENGTH, num_retractions=1),
        )
    )

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.generate(request())
        load = engine.load()
        assert (load.preempted, load.generated_tokens, load.recomputed_tokens) == (1, 3, 5)

    lines = [line for line in serve(model, server, scene) if line["event"] == "engine.retracted"]
    assert [(line["trajectory_id"], line["tokens"]) for line in lines] == [(1, 5)]


MEMORY = ("/flush_cache", "/pause_generation", "/release_memory_occupation", "/resume_memory_occupation")


def test_memory_is_released_by_an_idle_server_and_resumed_around_the_weights(model: Path):
    """A server that is not idle, or has not released what it is to resume, dies of it."""
    server = StandIn(streaming(lambda body: answer(body, [4], LENGTH, versions=[("5", 0, 1)])))

    async def scene(engine: SGLangEngine, _: Attached, way: Way) -> None:
        await engine.release()
        await engine.release()
        way.go_on.clear()
        loading = asyncio.ensure_future(engine.load_weights(PUBLISHED))
        await way.begun.wait()
        assert server.bodies("/resume_memory_occupation") == [{"tags": ["weights"]}]
        way.go_on.set()
        await loading
        assert (await engine.generate(request(new_tokens=1))).versions.tolist() == [5]
        await engine.load_weights(PUBLISHED)

    lines = serve(model, server, scene)
    assert [(path, body.get("tags")) for path, body in server.asked if path in MEMORY] == [
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


def test_a_server_that_does_not_come_to_rest_keeps_its_memory(model: Path):
    server = StandIn(streaming(whole))
    server.idle = False

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        with pytest.raises(EngineFailure, match="the server was not idle within 60 s"):
            await engine.release()
        assert (await engine.generate(request())).finish == "length"

    serve(model, server, scene)
    assert server.bodies("/release_memory_occupation") == []


def test_weights_that_are_refused_leave_the_rest_of_the_memory_released(model: Path):
    server = StandIn(streaming(whole))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.release()
        with pytest.raises(WeightsRefused):
            await engine.load_weights(PUBLISHED)
        held = asyncio.ensure_future(engine.generate(request()))
        await asyncio.sleep(0)
        assert (engine.load().waiting, server.bodies("/generate")) == (1, [])
        engine.abort(1)
        await held
        await engine.release()

    serve(model, server, scene, WeightsRefused("damaged"))
    released = [body["tags"] for body in server.bodies("/release_memory_occupation")]
    assert released == [["kv_cache", "weights"], ["weights"]]
