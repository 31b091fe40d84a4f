"""A scripted server on loopback, for behaviours that a real server shows only rarely."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from aiohttp import web

from tests.engine.http.served_app import serving_app

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

INFO: dict[str, Any] = {
    **{"version": "0.5.23", "model_path": "/model", "max_total_num_tokens": 1000, "max_req_input_len": 250},
    **{"context_length": 256, "page_size": 1, "dp_size": 1, "tp_size": 1, "device": "cpu", "dtype": "float32"},
    **{"quantization": None, "enable_dp_attention": False, "enable_deterministic_inference": True},
    **{"enable_priority_scheduling": False, "disable_radix_cache": False, "enable_lora": None, "max_lora_rank": None},
    "lora_target_modules": None,
    "ignored_field": {"a": [1]},
}
LOAD: dict[str, Any] = {
    "dp_rank": 0,
    "num_running_reqs": 0,
    "num_waiting_reqs": 0,
    "num_used_tokens": 0,
    "max_total_num_tokens": 1000,
    "decode_moments": None,
}


class FakeServer:
    """Sends `generations` in order and repeats the last one. `requests` records path and body.

    Other requests get successful responses, unless `handlers` has a handler for the path.
    """

    def __init__(self, *generations: Handler) -> None:
        self.info = dict(INFO)
        self.weight_version = "default"
        self.generations = list(generations)
        self.handlers: dict[str, Handler] = {}
        self.num_broken_requests = 0  # the connections of this number of requests break
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.connections: set[object] = set()
        self.request_received = asyncio.Event()
        self.generation_received = asyncio.Event()

    def serving(self) -> AbstractAsyncContextManager[str]:
        """Serve requests within the context. Yields the base URL."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        return serving_app(app)

    def get_bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for request_path, body in self.requests if request_path == path]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        body = msgspec.json.decode(content) if content else {}
        self.requests.append((request.path, body))
        self.connections.add(request.transport)
        self.request_received.set()
        if self.num_broken_requests:
            self.num_broken_requests -= 1
            return await broken(request, body)
        if handler := self.handlers.get(request.path):
            return await handler(request, body)
        match request.path:
            case "/generate":
                self.generation_received.set()
                handler = self.generations.pop(0) if len(self.generations) > 1 else self.generations[0]
                return await handler(request, body)
            case "/server_info":
                return web.json_response(self.info)
            case "/model_info":
                return web.json_response({"model_path": "/model", "weight_version": self.weight_version})
            case "/v1/loads":
                return web.json_response({"loads": [LOAD]})
            case _:
                return web.json_response({"success": True, "message": ""})


def make_response(
    body: dict[str, Any],
    token_ids: Sequence[int],
    finish: dict[str, Any] | None = None,
    *,
    versions: Sequence[tuple[str, int, int]] | None = None,
    cached_tokens: int = 0,
    num_retractions: int = 0,
    without: Sequence[str] = (),
    **changes: Any,
) -> dict[str, Any]:
    """Return a cumulative response. `changes`: new fields of its meta_info. `without`: fields removed from it."""
    spans = [("2", 0, len(token_ids))] if versions is None else versions
    meta: dict[str, Any] = {
        "id": body["rid"],
        "finish_reason": finish,
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": len(token_ids),
        "cached_tokens": cached_tokens,
        "num_retractions": num_retractions,
        "weight_version": "2",
        "weight_versions": [{"version": name, "start": start, "end": end} for name, start, end in spans],
        "output_token_logprobs": [[-0.5 * token, token, None] for token in token_ids],
        "dp_rank": 0,
        **changes,
    }
    for field in without:
        del meta[field]
    return {"text": "", "output_ids": list(token_ids), "meta_info": meta}


LENGTH = {"type": "length", "length": 3}
STOPPED = {"type": "stop", "matched": 7}
ABORTED = {"type": "abort", "message": "asked for", "status_code": None}


def make_full_response(body: dict[str, Any]) -> dict[str, Any]:
    return make_response(body, [4, 5, 6], LENGTH)


async def broken(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Read the request and close the connection."""
    _get_transport(request).abort()
    return web.Response()


async def silent(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Wait forever without responding."""
    await asyncio.Event().wait()
    raise AssertionError


def _get_transport(request: web.Request) -> asyncio.Transport:
    assert request.transport is not None
    return request.transport


def refusing(status: int, content: Any) -> Handler:
    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(content, status=status)

    return handle


def streaming(
    *responses: Callable[[dict[str, Any]], dict[str, Any]] | asyncio.Event | bytes, then: str = "done"
) -> Handler:
    """Return a handler that sends each response as an event and bytes unchanged, and waits for each asyncio.Event.

    `then`: "done", "broken" (closes the connection), "cut" (ends the stream too early) or "silent"
    (sends nothing).
    """

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for each in responses:
            if isinstance(each, asyncio.Event):
                await each.wait()
                continue
            event = each if isinstance(each, bytes) else b"data: " + msgspec.json.encode(each(body)) + b"\n\n"
            await response.write(event)
        if then == "silent":
            await asyncio.Event().wait()
        if then == "broken":
            _get_transport(request).close()
        if then == "done":
            await response.write(b"data: [DONE]\n\n")
        return response

    return handle
