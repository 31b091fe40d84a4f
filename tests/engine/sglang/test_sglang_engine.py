"""The SGLang engine with a server that fails in ways that a real server does not show on request.

tests/sglang runs the engine contract against a real server.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.contract import EngineFailure, RequestRefused
from engine.sglang.errors import InvalidResponse
from engine.sglang.sglang_engine import SGLangEngine
from tests.engine.sglang.fake_server import LENGTH, STOPPED, FakeServer, broken, make_response, refusing, streaming
from tests.engine.sglang.scenes import (
    VOCABULARY,
    FakeServerHandle,
    FakeTransport,
    make_full_response,
    make_request,
    run_scene,
    wait_for_tokens,
)


def test_a_request_contains_all_sampling_parameters(model: Path):
    server = FakeServer(streaming(make_full_response))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        generation = await engine.generate(make_request(stop=(7, 8)))
        assert (generation.token_ids.tolist(), generation.finish) == ([4, 5, 6], "length")
        assert generation.versions.tolist() == [2, 2, 2]

    run_scene(model, server, scene)
    [body] = server.get_bodies("/generate")
    params = body["sampling_params"]
    assert params["sampling_seed"] == -(2**63) + 1
    assert (params["stop_token_ids"], params["ignore_eos"], params["max_new_tokens"]) == ([7, 8], False, 3)
    assert (params["repetition_penalty"], params["top_k"], params["top_p"], params["min_p"]) == (1.0, -1, 1.0, 0.0)
    assert (body["return_logprob"], body["logprob_start_len"], body["stream"]) == (True, -1, True)


def test_no_request_id_is_a_prefix_of_another(model: Path):
    server = FakeServer(streaming(make_full_response))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        for _ in range(12):
            await engine.generate(make_request())

    run_scene(model, server, scene)
    rids = [body["rid"] for body in server.get_bodies("/generate")]
    assert [(one, other) for one in rids for other in rids if one != other and other.startswith(one)] == []


def test_generation_continues_after_an_unrequested_stop(model: Path):
    server = FakeServer(
        streaming(lambda body: make_response(body, [4, 9], {"type": "stop", "matched": 9})),
        streaming(lambda body: make_response(body, [7], STOPPED)),
    )

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        generation = await engine.generate(make_request(new_tokens=5, stop=(7,)))
        assert (generation.token_ids.tolist(), generation.finish) == ([4, 9, 7], "stop")

    run_scene(model, server, scene)
    first, second = server.get_bodies("/generate")
    assert (second["input_ids"], second["sampling_params"]["max_new_tokens"]) == ([*first["input_ids"], 4, 9], 3)
    assert first["rid"] != second["rid"]  # a reused rid is aborted two seconds later


def test_an_unrequested_stop_at_the_last_token_finishes_with_length(model: Path):
    server = FakeServer(streaming(lambda body: make_response(body, [4, 5, 9], {"type": "stop", "matched": 9})))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        assert (await engine.generate(make_request(stop=(7,)))).finish == "length"

    run_scene(model, server, scene)


@pytest.mark.parametrize(
    ("loaded_version", "path", "expected"),
    [
        ("default", "/update_weight_version", {"new_version": "2", "abort_all_requests": False}),
        ("7", "/update_weights_from_disk", {"weight_version": "2", "flush_cache": False}),
        ("2", "/update_weights_from_disk", None),
    ],
)
def test_a_server_starts_with_the_checkpoints_weights_and_version(
    model: Path, loaded_version: str, path: str, expected: dict[str, Any] | None
):
    server = FakeServer()
    server.weight_version = loaded_version

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        assert engine.version == 2

    run_scene(model, server, scene)
    if expected and loaded_version == "7":
        expected["model_path"] = str(model)
    assert server.get_bodies(path) == ([expected] if expected else [])


def test_a_cache_of_other_weights_is_not_reused(model: Path):
    server = FakeServer(streaming(make_full_response))
    server.weight_version = "7"

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.generate(make_request())

    run_scene(model, server, scene)
    run_scene(model, server, scene)
    first, second = (body["extra_key"] for body in server.get_bodies("/generate"))
    assert first != second


def test_a_server_left_paused_is_resumed_first(model: Path):
    server = FakeServer()
    run_scene(model, server, _do_nothing)
    changes = [path for path, _ in server.requests if path not in ("/server_info", "/model_info", "/v1/loads")]
    assert changes == ["/continue_generation", "/update_weight_version"]


async def _do_nothing(*_: Any) -> None:
    pass


def test_requests_that_would_crash_the_server_are_refused(model: Path):
    server = FakeServer(streaming(make_full_response))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        for bad in (VOCABULARY, -1):
            with pytest.raises(RequestRefused, match=f"token id {bad} at position 1 is outside the vocabulary of 20"):
                await engine.generate(make_request(1, 3, bad))
        with pytest.raises(RequestRefused, match="exceed the limit of 100 tokens per sequence"):
            await engine.generate(make_request(new_tokens=98))

    run_scene(model, server, scene)
    assert server.get_bodies("/generate") == []


@pytest.mark.parametrize("paused", [False, True])
def test_a_turn_with_a_broken_connection_keeps_its_tokens_if_the_server_lives(model: Path, paused: bool):
    server = FakeServer(streaming(lambda body: make_response(body, [4, 5]), then="broken"))
    server.paused = paused

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        generation = await engine.generate(make_request())
        assert (generation.token_ids.tolist(), generation.finish) == ([4, 5], "abort")

    lines = run_scene(model, server, scene)
    assert [line["tokens"] for line in lines if line["event"] == "turn.truncated"] == [2]


def test_a_turn_with_a_connection_broken_before_its_first_token_fails(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        with pytest.raises(EngineFailure, match="/generate: the connection broke"):
            await engine.generate(make_request())

    run_scene(model, FakeServer(broken), scene)


def test_an_invalid_response_fails_the_turn(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        with pytest.raises(InvalidResponse, match="outside the vocabulary of 20"):
            await engine.generate(make_request())

    run_scene(model, FakeServer(streaming(lambda body: make_response(body, [4, 5, 20], LENGTH))), scene)


def test_a_request_that_the_server_rejects_is_refused(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        with pytest.raises(RequestRefused, match="sequence 1: no such thing"):
            await engine.generate(make_request())

    run_scene(model, FakeServer(refusing(400, {"error": {"message": "no such thing"}})), scene)


def test_a_dead_server_fails_pending_and_later_turns(model: Path):
    async def scene(engine: SGLangEngine, handle: FakeServerHandle, _: FakeTransport) -> None:
        calls = [asyncio.ensure_future(engine.generate(make_request(number))) for number in range(3)]
        await wait_for_tokens(engine, 3)
        handle.death.set_result("signal 9")
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(each) for each in results] == ["the server ended: signal 9"] * 3
        with pytest.raises(EngineFailure, match="the server ended: signal 9"):
            await engine.generate(make_request())

    run_scene(model, FakeServer(streaming(lambda body: make_response(body, [4]), then="silent")), scene)


def test_a_server_with_too_short_a_context_is_refused(model: Path):
    async def never(*_: Any) -> None:
        raise AssertionError

    with pytest.raises(
        RequestRefused, match=r"may have 251 tokens, the server accepts at most 250 \(max_req_input_len"
    ):
        run_scene(model, FakeServer(streaming(make_full_response)), never, sequence_tokens=251)


def test_a_server_that_ignores_seeds_is_logged(model: Path):
    server = FakeServer(streaming(make_full_response))
    server.info["enable_deterministic_inference"] = False

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.generate(make_request())

    assert "engine.seeds_ignored" in [line["event"] for line in run_scene(model, server, scene)]


def test_ranks_and_priorities_are_sent_if_the_server_supports_them(model: Path):
    server = FakeServer(streaming(make_full_response))
    server.info |= {"dp_size": 2, "enable_priority_scheduling": True}

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.generate(make_request(1))
        await engine.generate(make_request(1, 1, 2, 3, 4))

    run_scene(model, server, scene)
    bodies = server.get_bodies("/generate")
    assert [(body["routed_dp_rank"], body["priority"]) for body in bodies] == [(0, 3), (0, 4)]


def test_calls_beyond_the_limit_and_duplicate_sequences_fail(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        first = asyncio.ensure_future(engine.generate(make_request(1)))
        await wait_for_tokens(engine, 1)
        with pytest.raises(RequestRefused, match="sequence 1 is being generated already"):
            await engine.generate(make_request(1))
        with pytest.raises(EngineFailure, match="1 calls are pending, the engine takes no more"):
            await engine.generate(make_request(2))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

    run_scene(model, FakeServer(streaming(lambda body: make_response(body, [4]), then="silent")), scene, max_pending=1)


def test_closing_fails_pending_turns(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        call = asyncio.ensure_future(engine.generate(make_request()))
        await wait_for_tokens(engine, 1)
        await engine.close()
        with pytest.raises(EngineFailure, match="the engine is closed"):
            await call

    run_scene(model, FakeServer(streaming(lambda body: make_response(body, [4]), then="silent")), scene)
