"""Checks HTTP responses of other projects' servers: bounded, uncompressed, and from the configured address only.

A compressed body of a megabyte can expand to a gigabyte, so requests accept no compression, and compressed responses
are refused. A redirect could lead to an address that only this machine reaches. This file imports neither aiohttp nor
httpx2, because the interpreter of a task may lack one of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

MAX_BODY_BYTES = 1 << 24  # limit of a single document
MAX_STREAM_BYTES = 1 << 26  # limit of a stream of events, which may last for a session
PLAIN = {"Accept-Encoding": "identity"}
_REDIRECTS = range(300, 400)


class ResponseRefused(Exception):
    """A response is too large, compressed, or a redirect. The message names the reason."""


def check_response(status: int, headers: Any) -> None:
    """Raise ResponseRefused for a redirect or a compressed response. `headers`: a case-insensitive mapping."""
    if status in _REDIRECTS and "location" in headers:
        raise ResponseRefused(f"the server redirects to {headers['location'][:200]}; set `url` to this address")
    if headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise ResponseRefused(
            f"the server compresses its response ({headers['content-encoding'][:40]}); disable its compression"
        )


async def refuse_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Check each response of a session as a middleware, also for the opening of a WebSocket. Raises ResponseRefused."""
    response = await handler(request)
    try:
        check_response(response.status, response.headers)
    except ResponseRefused:
        response.close()
        raise
    return response


async def read_bounded(response: aiohttp.ClientResponse) -> bytes:
    """Read the body. Raises ResponseRefused for a body of more than MAX_BODY_BYTES."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ResponseRefused(f"the response has more than {MAX_BODY_BYTES >> 20} MiB")
    return bytes(body)


def make_response_hook(httpx2: Any) -> Callable[[Any], Awaitable[None]]:
    """Make an event hook that checks and bounds responses. `httpx2`: the package, which this file cannot import."""

    class BoundedStream(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            num_bytes = 0
            async for chunk in self._stream:
                num_bytes += len(chunk)
                if num_bytes > MAX_STREAM_BYTES:
                    raise httpx2.ReadError(f"the response has more than {MAX_STREAM_BYTES >> 20} MiB")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: Any) -> None:
        try:
            check_response(response.status_code, response.headers)
        except ResponseRefused as error:
            raise httpx2.ReadError(str(error)) from None
        response.stream = BoundedStream(response.stream)

    return bound
