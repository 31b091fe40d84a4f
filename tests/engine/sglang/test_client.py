"""Tests of the HTTP client of an SGLang server: retries and exceptions."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asterism.engine.http.errors import InvalidResponse, ServerStatusError, ServerTimeout, ServerUnreachable
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import FinishedByLength, GenerateRequest, GenerateResponse, SamplingParams
from tests.engine.sglang.fake_server import (
    LENGTH,
    FakeServer,
    Handler,
    broken,
    make_full_response,
    make_response,
    refusing,
    silent,
    streaming,
)

pytestmark = pytest.mark.real_clock
REQUEST = GenerateRequest("1;", [1, 2, 3], SamplingParams(max_new_tokens=3), stream=True)
FULL = {"type": "abort", "message": "The request queue is full.", "status_code": 503}


@asynccontextmanager
async def connected(server: FakeServer, request_timeout_s: float = 600.0) -> AsyncIterator[SGLangClient]:
    async with (
        server.serving() as url,
        SGLangClient(url, request_timeout_s=request_timeout_s, retry_delays_s=(0.0, 0.0)) as client,
    ):
        yield client


async def collect(client: SGLangClient) -> list[GenerateResponse]:
    return [each async for each in client.generate_streamed(REQUEST)]


async def generate(server: FakeServer, request_timeout_s: float = 600.0) -> list[GenerateResponse]:
    """Send one request and return its responses."""
    async with connected(server, request_timeout_s) as client:
        return await collect(client)


async def test_a_stream_yields_all_its_responses_in_order() -> None:
    server = FakeServer(streaming(lambda body: make_response(body, [4]), make_full_response))
    answers = await generate(server)
    assert [each.output_ids for each in answers] == [[4], [4, 5, 6]]
    assert [each.meta_info.finish_reason for each in answers] == [None, FinishedByLength()]
    [body] = server.get_bodies("/generate")
    assert (body["input_ids"], body["sampling_params"]["top_k"], body["stream"]) == ([1, 2, 3], -1, True)
    assert "priority" not in body


async def test_the_connection_of_a_completed_stream_is_reused() -> None:
    server = FakeServer(streaming(make_full_response))
    async with connected(server) as client:
        for _ in range(3):
            await collect(client)
    assert len(server.connections) == 1


@pytest.mark.slow
async def test_a_response_larger_than_one_read_is_reassembled() -> None:
    ids = [7] * 20_000
    [answer] = await generate(FakeServer(streaming(lambda body: make_response(body, ids, LENGTH))))
    assert answer.output_ids == ids


async def test_each_form_of_the_error_for_a_full_queue_causes_a_retry() -> None:
    refused = refusing(503, {"object": "error", "message": "full", "type": "503", "code": 503})
    aborted = streaming(lambda body: make_response(body, [], FULL))
    server = FakeServer(refused, aborted, streaming(make_full_response))
    answers = await generate(server)
    assert answers[-1].output_ids == [4, 5, 6]
    rids = [body["rid"] for body in server.get_bodies("/generate")]
    assert len(set(rids)) == len(rids) == 3


@pytest.mark.parametrize(
    ("status", "content", "message", "num_attempts"),
    [
        (503, {"error": {"message": "The request queue is full."}}, "503 The request queue is full.", 3),
        (400, {"error": "unknown field `sampling_params.beams`"}, "400 unknown field `sampling_params.beams`", 1),
    ],
)
async def test_a_refused_generation_is_retried_only_if_the_queue_is_full(
    status: int, content: dict[str, Any], message: str, num_attempts: int
) -> None:
    server = FakeServer(refusing(status, content))
    async with connected(server) as client:
        with pytest.raises(ServerStatusError) as refusal:
            await collect(client)
        assert (str(refusal.value), refusal.value.status) == (f"the server refused /generate: {message}", status)
    assert len(server.get_bodies("/generate")) == num_attempts


async def test_an_error_within_a_stream_raises_a_status_error() -> None:
    error = {"error": {"message": "too long", "type": "invalid_request_error", "code": 400, "retryable": False}}
    with pytest.raises(ServerStatusError, match="400 too long"):
        await generate(FakeServer(streaming(lambda body: error)))


async def test_after_a_refused_connection_the_request_counts_as_not_sent() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # the port is bound, but nothing listens
        client = SGLangClient(f"http://127.0.0.1:{free.getsockname()[1]}", retry_delays_s=(0.0,))
        with pytest.raises(ServerUnreachable) as failure:
            await collect(client)
        assert not failure.value.request_sent
        assert not await client.is_ready()
        assert not await client.is_responsive()
        await client.close()


@pytest.mark.parametrize(
    ("handler", "received_ids"),
    [
        (streaming(lambda body: make_response(body, [4]), then="broken"), [[4]]),
        (streaming(lambda body: make_response(body, [4]), then="cut"), [[4]]),
        (broken, []),
    ],
    ids=["broken stream", "stream without its end", "no response"],
)
async def test_a_generation_that_was_sent_is_not_retried(handler: Handler, received_ids: list[list[int]]) -> None:
    server = FakeServer(handler)
    async with connected(server) as client:
        received: list[list[int]] = []
        with pytest.raises(ServerUnreachable) as failure:
            async for each in client.generate_streamed(REQUEST):
                received.append(each.output_ids)
        assert (received, failure.value.request_sent) == (received_ids, True)
    assert len(server.get_bodies("/generate")) == 1


async def test_a_read_is_retried_when_its_connection_breaks() -> None:
    server = FakeServer()
    server.num_broken_requests = 2
    async with connected(server) as client:
        assert (await client.get_server_info()).max_req_input_len == 250
    assert len(server.get_bodies("/server_info")) == 3


async def test_a_server_without_a_response_times_out() -> None:
    with pytest.raises(ServerTimeout, match=r"/generate: no response within 0\.05 s"):
        await generate(FakeServer(silent), request_timeout_s=0.05)


async def test_the_error_for_an_unsupported_version_names_it() -> None:
    server = FakeServer()
    server.info["version"] = "0.6.0"
    del server.info["page_size"]
    async with connected(server) as client:
        with pytest.raises(InvalidResponse, match=r"SGLang 0\.6\.0 is not supported; supported: 0\.5\.23"):
            await client.get_server_info()


async def test_the_error_for_a_missing_field_names_the_servers_version() -> None:
    server = FakeServer(streaming(lambda body: make_response(body, [4], without=["weight_version"])))
    del server.info["page_size"]
    async with connected(server) as client:
        with pytest.raises(InvalidResponse, match=r"SGLang 0\.5\.23 sent an invalid ServerInfo: .*`page_size`"):
            await client.get_server_info()
        with pytest.raises(
            InvalidResponse, match=r"SGLang 0\.5\.23 sent an invalid GenerateResponse: .*`weight_version`.*meta_info"
        ):
            await collect(client)


async def test_concurrent_generations_are_limited_by_max_in_flight() -> None:
    server = FakeServer(silent)
    async with server.serving() as url, SGLangClient(url, max_in_flight=1) as client:
        calls = [asyncio.ensure_future(client.generate(REQUEST)) for _ in range(2)]
        await server.generation_received.wait()
        assert len(await client.get_loads()) == 1  # max_in_flight does not limit control calls
        assert len(server.get_bodies("/generate")) == 1
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
