"""Tests of the streams of an SGLang server: which ends count as complete. tests/engine/http tests the framing."""

from typing import Any

import msgspec
import pytest
from aiohttp import web

from asterism.engine.contract import EngineFailure
from asterism.engine.http import http_session
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import GenerateRequest, SamplingParams
from tests.engine.sglang.fake_server import LENGTH, FakeServer, Handler, make_response, streaming

pytestmark = pytest.mark.real_clock
REQUEST = GenerateRequest("1;", [1, 2, 3], SamplingParams(max_new_tokens=3), stream=True)
FIRST, LAST, DONE = b"<first>", b"<last>", b"data: [DONE]\n\n"
PLAIN = b"data: <first>\n\ndata: <last>\n\n"

COMPLETE = {
    "other fields": b"\xef\xbb\xbf: ping\r\nevent: x\r\ndata:<first>\r\n\r\ndata\r\n\r\ndata: <last>\nid: 2\n\n" + DONE,
    "no done": PLAIN,
    "done behind other data": b"data: <last>\n\n" + DONE,
}
INCOMPLETE = {
    "done without a finish": (b"data: <first>\n\n" + DONE, "the stream ended early, without a finish reason"),
    "last event without an empty line": (PLAIN[:-1], "the stream ended early, without a finish reason"),
    "error event": (b"event: error\ndata: out of memory\n\n" + DONE, "500 out of memory"),
    "text": (b"data: overloaded\n\n" + PLAIN, "invalid GenerateResponse"),
}


def playing(stream: bytes, then: str = "cut") -> Handler:
    """Return a handler that sends the stream in pieces of seven bytes; <first> and <last> are replaced by responses."""

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        first, last = make_response(body, [4]), make_response(body, [4, 5, 6], LENGTH)
        filled = stream.replace(FIRST, msgspec.json.encode(first)).replace(LAST, msgspec.json.encode(last))
        pieces = (filled[place : place + 7] for place in range(0, len(filled), 7))
        return await streaming(*pieces, then=then)(request, body)

    return handle


async def read_last_ids(handler: Handler) -> list[int]:
    async with FakeServer(handler).serving() as url, SGLangClient(url, retry_delays_s=()) as client:
        responses = [each async for each in client.generate_streamed(REQUEST)]
    assert responses[-1].meta_info.finish_reason is not None
    return responses[-1].output_ids


@pytest.mark.parametrize("name", COMPLETE)
async def test_a_complete_stream_is_read(name: str) -> None:
    assert await read_last_ids(playing(COMPLETE[name])) == [4, 5, 6]


@pytest.mark.parametrize("ending", ["broken", "silent"])
@pytest.mark.parametrize("stream", [PLAIN, PLAIN + DONE], ids=["finish", "done"])
async def test_a_stream_is_complete_even_if_it_breaks_or_stalls_after_the_last_response(
    stream: bytes, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_session, "STREAM_END_S", 0.05)
    assert await read_last_ids(playing(stream, ending)) == [4, 5, 6]


@pytest.mark.parametrize("name", INCOMPLETE)
async def test_an_incomplete_stream_is_a_failure(name: str) -> None:
    stream, cause = INCOMPLETE[name]
    with pytest.raises(EngineFailure, match=cause):
        await read_last_ids(playing(stream))


async def test_a_break_before_the_last_response_is_a_failure() -> None:
    with pytest.raises(EngineFailure, match="the connection broke"):
        await read_last_ids(playing(b"data: <first>\n\n", "broken"))
