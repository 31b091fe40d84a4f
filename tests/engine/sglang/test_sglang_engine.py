"""Tests of the SGLang engine with a fake server, because a real server fails only rarely.

tests/sglang runs the engine contract with a real server, which covers limits, priorities, ranks and
the end of a server.
"""

from pathlib import Path
from typing import Any

import pytest

from asterism.engine.contract import EngineFailure, RequestRefused
from asterism.engine.http.errors import InvalidResponse
from tests.engine.sglang.fake_server import (
    LENGTH,
    STOPPED,
    FakeServer,
    Handler,
    broken,
    make_full_response,
    make_response,
    refusing,
    streaming,
)
from tests.engine.sglang.scenes import generate_turn, make_request, running_engine

pytestmark = pytest.mark.real_clock


async def test_a_request_contains_all_sampling_parameters(model: Path):
    server = FakeServer(streaming(make_full_response))
    generation = await generate_turn(model, server, stop=(7, 8))
    assert (generation.token_ids.tolist(), generation.finish) == ([4, 5, 6], "length")
    assert generation.versions.tolist() == [2, 2, 2]
    [body] = server.get_bodies("/generate")
    params = body["sampling_params"]
    assert params["sampling_seed"] == -(2**63) + 1
    assert (params["stop_token_ids"], params["ignore_eos"], params["max_new_tokens"]) == ([7, 8], False, 3)
    assert (params["repetition_penalty"], params["top_k"], params["top_p"], params["min_p"]) == (1.0, -1, 1.0, 0.0)
    assert (body["return_logprob"], body["logprob_start_len"], body["stream"]) == (True, -1, True)


async def test_no_request_id_is_a_prefix_of_another(model: Path):
    server = FakeServer(streaming(make_full_response))
    async with running_engine(model, server) as engine:
        for _ in range(12):
            await engine.generate(make_request())
    rids = [body["rid"] for body in server.get_bodies("/generate")]
    assert [(one, other) for one in rids for other in rids if one != other and other.startswith(one)] == []


async def test_a_generation_continues_after_an_unrequested_stop(model: Path):
    server = FakeServer(
        streaming(lambda body: make_response(body, [4, 9], {"type": "stop", "matched": 9})),
        streaming(lambda body: make_response(body, [7], STOPPED)),
        streaming(lambda body: make_response(body, [4, 5, 9], {"type": "stop", "matched": 9})),
    )
    async with running_engine(model, server) as engine:
        generation = await engine.generate(make_request(new_tokens=5, stop=(7,)))
        assert (generation.token_ids.tolist(), generation.finish) == ([4, 9, 7], "stop")
        assert (await engine.generate(make_request(stop=(7,)))).finish == "length"  # the stop token is the last token
    first, second, _ = server.get_bodies("/generate")
    assert (second["input_ids"], second["sampling_params"]["max_new_tokens"]) == ([*first["input_ids"], 4, 9], 3)
    assert first["rid"] != second["rid"]  # the server would abort a reused rid two seconds later


@pytest.mark.parametrize(
    ("loaded_version", "path", "expected"),
    [
        ("default", "/update_weight_version", {"new_version": "2", "abort_all_requests": False}),
        ("7", "/update_weights_from_disk", {"weight_version": "2", "flush_cache": False}),
        ("2", "/update_weights_from_disk", None),
    ],
)
async def test_a_server_starts_with_the_checkpoints_weights_and_version(
    model: Path, loaded_version: str, path: str, expected: dict[str, Any] | None
):
    server = FakeServer()
    server.weight_version = loaded_version
    async with running_engine(model, server):
        pass
    if expected and loaded_version == "7":
        expected["model_path"] = str(model)
    assert server.get_bodies(path) == ([expected] if expected else [])


async def test_a_server_for_evaluations_keeps_its_weights(model: Path):
    server = FakeServer()
    server.weight_version = "7"
    async with running_engine(model, server, keeps_weights=True):
        pass
    assert server.get_bodies("/update_weights_from_disk") == server.get_bodies("/update_weight_version") == []


async def test_a_cache_from_other_weights_is_not_reused(model: Path):
    server = FakeServer(streaming(make_full_response))
    server.weight_version = "7"
    for _ in range(2):
        await generate_turn(model, server)
    first, second = (body["extra_key"] for body in server.get_bodies("/generate"))
    assert first != second


async def test_a_server_that_is_still_paused_is_resumed_at_the_start(model: Path):
    server = FakeServer()
    async with running_engine(model, server):
        pass
    changes = [path for path, _ in server.requests if path not in ("/server_info", "/model_info", "/v1/loads")]
    assert changes == ["/continue_generation", "/update_weight_version"]


@pytest.mark.parametrize("paused", [False, True])
async def test_a_turn_with_a_broken_connection_keeps_its_tokens(model: Path, log_entries: list[Any], paused: bool):
    server = FakeServer(streaming(lambda body: make_response(body, [4, 5]), then="broken"))
    server.handlers["/ready"] = refusing(503 if paused else 200, {})
    async with running_engine(model, server) as engine:
        generation = await engine.generate(make_request())
        assert (generation.token_ids.tolist(), generation.finish) == ([4, 5], "abort")
    assert [line["tokens"] for line in log_entries if line["event"] == "turn.truncated"] == [2]


@pytest.mark.parametrize(
    ("handler", "kind", "message"),
    [
        (broken, EngineFailure, "/generate: the connection broke"),
        (
            streaming(lambda body: make_response(body, [4, 5, 20], LENGTH)),
            InvalidResponse,
            "outside the vocabulary of 20",
        ),
        (refusing(400, {"error": {"message": "no such thing"}}), RequestRefused, "sequence 1: no such thing"),
    ],
    ids=["broken before the first token", "invalid response", "rejected request"],
)
async def test_a_failed_turn_names_its_cause(model: Path, handler: Handler, kind: type[EngineFailure], message: str):
    with pytest.raises(kind, match=message):
        await generate_turn(model, FakeServer(handler))


@pytest.mark.parametrize(
    ("option", "value", "event"),
    [
        ("enable_deterministic_inference", False, "engine.seeds_ignored"),
        ("disable_radix_cache", True, "engine.prefix_cache_disabled"),
    ],
)
async def test_an_unfavourable_server_option_is_logged(
    model: Path, log_entries: list[Any], option: str, value: bool, event: str
):
    server = FakeServer()
    server.info[option] = value
    async with running_engine(model, server):
        assert [line["event"] for line in log_entries] == [event]
