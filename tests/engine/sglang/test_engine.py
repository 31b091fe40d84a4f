"""The SGLang engine before a server that fails in ways that a real one does not on request. The contract itself is tested
against a real one, in tests/sglang."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.contract import EngineFailure, RequestRefused
from engine.sglang.engine import SGLangEngine
from engine.sglang.errors import UnknownAnswer
from tests.engine.sglang.scenes import VOCABULARY, Attached, Way, request, serve, until_tokens, whole
from tests.engine.sglang.stand_in import LENGTH, STOPPED, StandIn, answer, broken, refusing, streaming


def test_a_turn_is_asked_for_with_all_that_decides_it(model: Path):
    server = StandIn(streaming(whole))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        generation = await engine.generate(request(stop=(7, 8)))
        assert (generation.token_ids.tolist(), generation.finish) == ([4, 5, 6], "length")
        assert generation.versions.tolist() == [2, 2, 2]

    serve(model, server, scene)
    [body] = server.bodies("/generate")
    params = body["sampling_params"]
    assert params["sampling_seed"] == -(2**63) + 1
    assert (params["stop_token_ids"], params["ignore_eos"], params["max_new_tokens"]) == ([7, 8], False, 3)
    assert (params["repetition_penalty"], params["top_k"], params["top_p"], params["min_p"]) == (1.0, -1, 1.0, 0.0)
    assert (body["return_logprob"], body["logprob_start_len"], body["stream"]) == (True, -1, True)


def test_no_request_id_begins_another_one(model: Path):
    server = StandIn(streaming(whole))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        for _ in range(12):
            await engine.generate(request())

    serve(model, server, scene)
    rids = [body["rid"] for body in server.bodies("/generate")]
    assert [(one, other) for one in rids for other in rids if one != other and other.startswith(one)] == []


def test_a_stop_that_was_not_asked_for_is_gone_on_from(model: Path):
    server = StandIn(
        streaming(lambda body: answer(body, [4, 9], {"type": "stop", "matched": 9})),
        streaming(lambda body: answer(body, [7], STOPPED)),
    )

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        generation = await engine.generate(request(new_tokens=5, stop=(7,)))
        assert (generation.token_ids.tolist(), generation.finish) == ([4, 9, 7], "stop")

    serve(model, server, scene)
    first, second = server.bodies("/generate")
    assert (second["input_ids"], second["sampling_params"]["max_new_tokens"]) == ([*first["input_ids"], 4, 9], 3)
    assert first["rid"] != second["rid"]  # one that comes again is aborted two seconds after the former's end


def test_a_stop_that_was_not_asked_for_at_the_last_token_is_the_length(model: Path):
    server = StandIn(streaming(lambda body: answer(body, [4, 5, 9], {"type": "stop", "matched": 9})))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        assert (await engine.generate(request(stop=(7,)))).finish == "length"

    serve(model, server, scene)


@pytest.mark.parametrize(
    ("named", "path", "said"),
    [
        ("default", "/update_weight_version", {"new_version": "2", "abort_all_requests": False}),
        ("7", "/update_weights_from_disk", {"weight_version": "2", "flush_cache": False}),
        ("2", "/update_weights_from_disk", None),
    ],
)
def test_a_server_begins_with_the_checkpoints_weights_under_their_number(
    model: Path, named: str, path: str, said: dict[str, Any] | None
):
    server = StandIn()
    server.weight_version = named

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        assert engine.version == 2

    serve(model, server, scene)
    if said and named == "7":
        said["model_path"] = str(model)
    assert server.bodies(path) == ([said] if said else [])


def test_what_a_server_cached_under_other_weights_is_not_found_under_the_checkpoints(model: Path):
    server = StandIn(streaming(whole))
    server.weight_version = "7"

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.generate(request())

    serve(model, server, scene)
    serve(model, server, scene)
    first, second = (body["extra_key"] for body in server.bodies("/generate"))
    assert first != second


def test_a_server_that_its_former_engine_left_paused_is_told_to_go_on_before_anything_else(model: Path):
    server = StandIn()
    serve(model, server, _nothing)
    changes = [path for path, _ in server.asked if path not in ("/server_info", "/model_info", "/v1/loads")]
    assert changes == ["/continue_generation", "/update_weight_version"]


async def _nothing(*_: Any) -> None:
    pass


def test_nothing_that_would_end_the_server_is_sent(model: Path):
    server = StandIn(streaming(whole))

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        for bad in (VOCABULARY, -1):
            with pytest.raises(RequestRefused, match=f"token id {bad} at position 1 is outside the vocabulary of 20"):
                await engine.generate(request(1, 3, bad))
        with pytest.raises(RequestRefused, match="beyond the 100 of a sequence"):
            await engine.generate(request(new_tokens=98))

    serve(model, server, scene)
    assert server.bodies("/generate") == []


@pytest.mark.parametrize("paused", [False, True])
def test_a_turn_whose_connection_breaks_keeps_what_it_had_where_the_server_lives(model: Path, paused: bool):
    server = StandIn(streaming(lambda body: answer(body, [4, 5]), then="broken"))
    server.paused = paused

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        generation = await engine.generate(request())
        assert (generation.token_ids.tolist(), generation.finish) == ([4, 5], "abort")

    lines = serve(model, server, scene)
    assert [line["tokens"] for line in lines if line["event"] == "turn.broken_off"] == [2]


def test_a_turn_whose_connection_breaks_before_it_had_anything_fails(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        with pytest.raises(EngineFailure, match="/generate: the connection broke"):
            await engine.generate(request())

    serve(model, StandIn(broken), scene)


def test_what_is_wrong_with_an_answer_fails_the_turn(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        with pytest.raises(UnknownAnswer, match="outside the vocabulary of 20"):
            await engine.generate(request())

    serve(model, StandIn(streaming(lambda body: answer(body, [4, 5, 20], LENGTH))), scene)


def test_what_the_server_calls_bad_is_refused(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        with pytest.raises(RequestRefused, match="sequence 1: no such thing"):
            await engine.generate(request())

    serve(model, StandIn(refusing(400, {"error": {"message": "no such thing"}})), scene)


def test_a_dead_server_fails_what_is_pending_and_all_that_follows(model: Path):
    async def scene(engine: SGLangEngine, attached: Attached, _: Way) -> None:
        calls = [asyncio.ensure_future(engine.generate(request(number))) for number in range(3)]
        await until_tokens(engine, 3)
        attached.died.set_result("signal 9")
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(each) for each in found] == ["the server ended: signal 9"] * 3
        with pytest.raises(EngineFailure, match="the server ended: signal 9"):
            await engine.generate(request())

    serve(model, StandIn(streaming(lambda body: answer(body, [4]), then="silent")), scene)


def test_a_server_for_shorter_sequences_is_refused_by_name(model: Path):
    async def never(*_: Any) -> None:
        raise AssertionError

    with pytest.raises(RequestRefused, match=r"may have 251 tokens, the server takes 250 \(max_req_input_len"):
        serve(model, StandIn(streaming(whole)), never, sequence_tokens=251)


def test_a_server_that_takes_no_seeds_is_said_so(model: Path):
    server = StandIn(streaming(whole))
    server.info["enable_deterministic_inference"] = False

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.generate(request())

    assert "engine.seeds_ignored" in [line["event"] for line in serve(model, server, scene)]


def test_ranks_and_priorities_are_named_where_the_server_has_them(model: Path):
    server = StandIn(streaming(whole))
    server.info |= {"dp_size": 2, "enable_priority_scheduling": True}

    async def scene(engine: SGLangEngine, *_: Any) -> None:
        await engine.generate(request(1))
        await engine.generate(request(1, 1, 2, 3, 4))

    serve(model, server, scene)
    bodies = server.bodies("/generate")
    assert [(body["routed_dp_rank"], body["priority"]) for body in bodies] == [(0, 3), (0, 4)]


def test_calls_beyond_the_bound_and_twice_the_same_sequence_fail(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        first = asyncio.ensure_future(engine.generate(request(1)))
        await until_tokens(engine, 1)
        with pytest.raises(RequestRefused, match="sequence 1 is being generated already"):
            await engine.generate(request(1))
        with pytest.raises(EngineFailure, match="1 calls are pending, the engine takes no more"):
            await engine.generate(request(2))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

    serve(model, StandIn(streaming(lambda body: answer(body, [4]), then="silent")), scene, max_pending=1)


def test_closing_fails_what_is_pending(model: Path):
    async def scene(engine: SGLangEngine, *_: Any) -> None:
        call = asyncio.ensure_future(engine.generate(request()))
        await until_tokens(engine, 1)
        await engine.close()
        with pytest.raises(EngineFailure, match="the engine is closed"):
            await call

    serve(model, StandIn(streaming(lambda body: answer(body, [4]), then="silent")), scene)
