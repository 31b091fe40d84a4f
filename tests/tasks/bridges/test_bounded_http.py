"""A hostile server at a real socket sends endless, compressed and redirecting responses."""

import asyncio
import contextlib
import gzip
import resource

import pytest
from aiohttp import web

from asterism.tasks.bridges.bounded_http import MAX_BODY_BYTES, ResponseRefused, check_response
from asterism.tasks.bridges.openenv_session import OpenEnvSession
from asterism.tasks.contract import Fault
from tests.tasks.bridges.openenv_stub import OpenEnvStub

pytestmark = pytest.mark.real_clock
_CHUNK = b" " * (1 << 18)
_LIMIT_S = 20.0


class HostileServer(OpenEnvStub):
    """A server that answers /schema and /ws by its `mode`."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self._mode = mode
        self.sent_bytes = 0
        self.internal_requests: list[str] = []
        self._handlers["/internal"] = self._answer_internal

    async def _answer_internal(self, request: web.Request) -> web.Response:
        self.internal_requests.append(request.headers.get("Upgrade", "document"))
        return web.json_response({})

    async def _send_schema(self, request: web.Request) -> web.StreamResponse:
        match self._mode:
            case "endless":
                return await self._stream(request)
            case "redirected":
                raise web.HTTPFound("/internal")
            case "redirected by a script":
                return web.Response(status=308, headers={"Location": "//127.0.0.1:1/internal"})
            case "bomb":
                body = gzip.compress(b" " * (64 << 20))
                return web.Response(body=body, headers={"Content-Encoding": "gzip"})
            case _:
                return await super()._send_schema(request)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(_CHUNK)
                self.sent_bytes += len(_CHUNK)
        return response

    async def _converse(self, request: web.Request) -> web.StreamResponse:
        if self._mode == "redirected websocket":
            raise web.HTTPTemporaryRedirect("/internal")
        websocket = web.WebSocketResponse()
        await websocket.prepare(request)
        with contextlib.suppress(ConnectionError):
            async for message in websocket:
                if "close" in message.data and self._mode == "endless close":
                    while True:
                        await websocket.send_str("x" * 1000)
                if self._mode == "huge frame":
                    await websocket.send_str("x" * (MAX_BODY_BYTES + 1))
        return websocket


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("endless", "the response has more than 16 MiB"),
        ("redirected", "the server redirects to /internal; set `url` to this address"),
        ("redirected by a script", "the server redirects to //127.0.0.1:1/internal; set `url`"),
        ("redirected websocket", "the server redirects to /internal; set `url`"),
        ("bomb", r"the server compresses its response \(gzip\); disable"),
    ],
)
async def test_a_hostile_response_is_refused_within_bounded_memory_and_time(mode: str, message: str) -> None:
    server, before_kib = HostileServer(mode), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with server.serving() as url:
        session = OpenEnvSession(url, _LIMIT_S)
        with pytest.raises(Fault, match=message):
            await session.open("message")
        await session.close()
    assert server.internal_requests == []
    assert server.sent_bytes <= 2 * MAX_BODY_BYTES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100 << 10


async def test_a_frame_beyond_the_limit_is_a_fault() -> None:
    async with HostileServer("huge frame").serving() as url:
        session = OpenEnvSession(url, _LIMIT_S)
        await session.open("message")
        with pytest.raises(Fault, match="closed the connection"):
            await session.request("reset", {})
        await session.close()


@pytest.mark.slow
async def test_closing_returns_even_if_the_server_sends_messages_forever() -> None:
    async with HostileServer("endless close").serving() as url:
        session = OpenEnvSession(url, 1.0)
        await session.open("message")
        async with asyncio.timeout(_LIMIT_S):
            await session.close()


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        *((200, {}), (404, {}), (304, {}), (200, {"content-encoding": "identity"}), (200, {"content-encoding": ""})),
        (101, {}),
    ],
)
def test_an_ordinary_response_is_accepted(status: int, headers: dict[str, str]) -> None:
    check_response(status, headers)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_every_redirect_is_refused(status: int) -> None:
    with pytest.raises(ResponseRefused, match="redirects to http://10"):
        check_response(status, {"location": "http://10.0.0.1/"})
