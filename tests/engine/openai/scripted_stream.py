"""A server on loopback that answers with scripted bytes, for behaviours that a real server shows only rarely."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

import msgspec
from aiohttp import web

from tests.engine.http.served_app import serving_app

MODEL = "scripted"
End = Literal["close", "abort", "hold"]


class Script(NamedTuple):
    """One response. `end` determines how the connection ends after the pieces; `abort` breaks it."""

    pieces: Sequence[bytes]
    end: End = "close"
    status: int = 200
    headers: Mapping[str, str] = {"Content-Type": "text/event-stream"}
    is_compressed: bool = False


class ScriptedServer:
    """Sends `scripts` in order and repeats the last one. A request for one token (at a start) is answered immediately.

    With `scripts_by_name`, the name in the prompt selects the script.
    """

    def __init__(self, *scripts: Script, scripts_by_name: Mapping[str, Script] | None = None) -> None:
        self.scripts, self._by_name = list(scripts), scripts_by_name or {}
        self.num_requests = 0
        self.connections: set[object] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        """Yield the server's URL."""
        app = web.Application()
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/v1/completions", self._complete)
        async with serving_app(app) as url:
            yield f"{url}/v1"

    async def _list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = msgspec.json.decode(await request.read())
        if not isinstance(body["prompt"], str) and self._by_name:  # only a text can contain a script's name
            return web.json_response({"error": {"message": "prompt must be a text"}}, status=400)
        if body["max_tokens"] == 1:
            return web.json_response({"choices": [{"text": "a", "finish_reason": "length"}]})
        self.num_requests += 1
        self.connections.add(request.transport)
        script = self._choose(body["prompt"])
        response = web.StreamResponse(status=script.status, headers=script.headers)
        if script.is_compressed:
            response.enable_compression()
        await response.prepare(request)
        for piece in script.pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        if script.end == "hold":
            await asyncio.Event().wait()
        if script.end == "abort":
            assert request.transport is not None
            request.transport.close()
        return response

    def _choose(self, prompt: object) -> Script:
        if self._by_name:
            return next(script for name, script in self._by_name.items() if f" {name} " in str(prompt))
        return self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
