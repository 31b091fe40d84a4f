"""A scripted server with OpenEnv's protocol, which runs in the process of the test."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

SCHEMA = {"action": {"properties": {"metadata": {}, "message": {"type": "string"}}, "additionalProperties": False}}


def observe(observation: dict[str, Any], reward: float | None = None, done: bool = False) -> str:
    return json.dumps({"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}})


def fail(code: str, message: str = "", **details: Any) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": message, **details}})


class OpenEnvStub:
    """A server that answers each request with the script's next frame; None means no answer. It closes at the end."""

    def __init__(self, *script: str | bytes | None, greeting: str = "", schema: Any = SCHEMA) -> None:
        self._script, self._greeting, self._schema = script, greeting, schema
        self.requests: list[dict[str, Any]] = []
        self.num_schemas = self.num_open = 0
        self._handlers = {"/schema": self._send_schema, "/ws": self._converse}

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        app = web.Application()
        app.add_routes([web.get(path, handler) for path, handler in self._handlers.items()])
        async with TestServer(app, host="127.0.0.1") as server:
            yield str(server.make_url("")).rstrip("/")

    async def _send_schema(self, request: web.Request) -> web.StreamResponse:
        self.num_schemas += 1
        return web.Response(status=404) if self._schema is None else web.json_response(self._schema)

    async def _converse(self, request: web.Request) -> web.StreamResponse:
        websocket = web.WebSocketResponse()
        await websocket.prepare(request)
        self.num_open += 1
        if self._greeting:  # a server without a free session sends only a greeting
            await websocket.send_str(self._greeting)
        else:
            await self._follow_script(websocket)
        await websocket.close()
        self.num_open -= 1
        return websocket

    async def _follow_script(self, websocket: web.WebSocketResponse) -> None:
        frames = iter(self._script)
        async for message in websocket:
            self.requests.append(json.loads(message.data))
            if self.requests[-1]["type"] == "close":
                return
            frame = next(frames, b"end")
            if frame == b"end":
                return
            if isinstance(frame, bytes):
                await websocket.send_bytes(frame)
            elif frame is not None:
                await websocket.send_str(frame)
