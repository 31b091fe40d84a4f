"""HTTP responses of servers of other projects: bounded, not compressed, and from the configured address only.

A compressed body of a megabyte may expand to a gigabyte, so requests ask for none and compressed responses are refused. A
redirect could lead to an address that only this machine reaches. Imports neither aiohttp nor httpx2: the interpreter of a
task may lack one of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

MAX_BODY_BYTES = 1 << 24  # of a single document
MAX_STREAM_BYTES = 1 << 26  # of a stream of events, which may last for a session
PLAIN = {"Accept-Encoding": "identity"}
_REDIRECTS = range(300, 400)


class ResponseRefused(Exception):
    """A response that is too large, compressed, or a redirect. The message names the reason."""


def check_response(status: int, headers: Any) -> None:
    """`headers`: a case-insensitive mapping. Raises ResponseRefused."""
    if status in _REDIRECTS and "location" in headers:
        raise ResponseRefused(f"the server redirects to {headers['location'][:200]}; set `url` to this address")
    if headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise ResponseRefused(f"the server compresses its response ({headers['content-encoding'][:40]}) unasked")


async def refuse_redirects(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """A middleware for all requests of a session, also for the opening of a WebSocket. Raises ResponseRefused."""
    response = await handler(request)
    try:
        check_response(response.status, response.headers)
    except ResponseRefused:
        response.close()
        raise
    return response


async def read_bounded(response: aiohttp.ClientResponse, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Raises ResponseRefused for a longer body, after `max_bytes` of it."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > max_bytes:
            raise ResponseRefused(f"the response has more than {max_bytes >> 20} MiB")
    return bytes(body)


def make_response_hook(httpx2: Any, max_bytes: int = MAX_STREAM_BYTES) -> Callable[[Any], Awaitable[None]]:
    """An event hook for responses of a client of the package httpx2, which may be missing here."""

    class BoundedStream(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            num_bytes = 0
            async for chunk in self._stream:
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise httpx2.ReadError(f"the response has more than {max_bytes >> 20} MiB")
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
