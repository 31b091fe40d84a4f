"""Sends HTTP requests to one inference server: pooled connections, timeouts, retried GETs, typed errors."""

import asyncio
import io
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import msgspec

from asterism.engine.http.errors import (
    InvalidResponse,
    ServerStatusError,
    ServerTimeout,
    ServerUnreachable,
    parse_error,
)
from asterism.engine.http.event_stream import EventReader, EventTooLong, ServerSentEvent

CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 2.0  # less than the 5 s after which the server closes an idle connection
STREAM_END_S = 2.0  # time from the last piece of an answer to the end of its response
_STREAM_END = b"[DONE]"
_EVENT_STREAM = "text/event-stream"
_JSON_HEADERS = {"Content-Type": "application/json"}


class HttpSession:
    def __init__(
        self,
        base_url: str,
        request_timeout_s: float,
        retry_delays_s: Sequence[float],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`headers`: headers of each request, such as an authorization."""
        self._headers = {**_JSON_HEADERS, **(headers or {})}
        self.base_url = base_url.rstrip("/")
        self._request_timeout_s, self._retry_delays_s = request_timeout_s, retry_delays_s
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str) -> bytes:
        """Return the response's body. Retries if the connection is refused or breaks."""
        for wait_s in self._retry_delays_s:
            try:
                return await self._request("GET", path)
            except ServerUnreachable:
                await asyncio.sleep(wait_s)
        return await self._request("GET", path)

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        return await self._request("POST", path, body)

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        """Return the status, which can be an error, and the response's body."""
        timeout_s = timeout_s or self._request_timeout_s
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        content = None if body is None else io.BytesIO(msgspec.json.encode(body))  # aiohttp sends a stream in pieces
        with _translate_errors(path, timeout_s):
            async with self._get_session().request(
                method, path, data=content, headers=self._headers, timeout=timeout
            ) as response:
                return response.status, await response.read()

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncGenerator["StreamedResponse"]:
        """Yield the response as a stream. Raises ServerStatusError except for status 200. The timeout is per piece."""
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, sock_read=self._request_timeout_s)
        with _translate_errors(path, self._request_timeout_s):
            async with self._get_session().post(path, data=body, headers=self._headers, timeout=timeout) as response:
                if response.status != 200:
                    retry_after = response.headers.get("Retry-After", "")
                    raise make_status_error(path, response.status, await response.read(), retry_after)
                yield StreamedResponse(path, response)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        status, content = await self.send(method, path, body)
        if status != 200:
            raise make_status_error(path, status, content)
        return content

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(self.base_url, connector=connector)
        return self._session


class StreamedResponse:
    """The JSON texts of a response: one for each of its events, or one for a response that is no event stream."""

    def __init__(self, path: str, response: aiohttp.ClientResponse) -> None:
        self._path, self._response = path, response
        self._end_deadline: float | None = None

    def expect_end(self) -> None:
        """Declare the answer complete: a broken connection is then no error, and the end takes at most STREAM_END_S."""
        if self._end_deadline is None:
            self._end_deadline = asyncio.get_running_loop().time() + STREAM_END_S

    async def iter_json(self) -> AsyncGenerator[bytes]:
        """Yield JSON up to [DONE] or the end of the response; the caller checks whether the answer is complete.

        Reads to the end of the body, because aiohttp reuses the connection only then. Raises
        ServerStatusError for an event of the kind `error`, and InvalidResponse for an endless response.
        """
        if self._response.content_type == "application/json":
            yield await self._response.read()
            return
        reader, has_ended = EventReader(), False
        while piece := await self._read_piece():
            for event in () if has_ended else self._read_events(reader, piece):
                if event.data.strip() == _STREAM_END:
                    has_ended = True
                    self.expect_end()
                    break
                yield event.data

    def describe_end(self) -> str:
        """Describe a stream that ended without a finish reason."""
        kind = self._response.content_type
        found = "" if kind == _EVENT_STREAM else f" (a response of the type {kind}, not {_EVENT_STREAM})"
        return f"{self._path}: the stream ended early, without a finish reason{found}"

    def _read_events(self, reader: EventReader, piece: bytes) -> Generator[ServerSentEvent]:
        """Yield the events with data: a server can send empty events to keep the connection alive."""
        try:
            for event in reader.add(piece):
                if event.kind == b"error":
                    status, message = parse_error(event.data) or (None, event.data[:500].decode(errors="replace"))
                    raise ServerStatusError(self._path, status or 500, message)
                if event.data.strip():
                    yield event
        except EventTooLong as error:
            raise InvalidResponse(f"{self._path}: {error}") from error

    async def _read_piece(self) -> bytes:
        """Return the next piece, which is empty at the end."""
        if self._end_deadline is None:
            return await self._response.content.readany()
        try:
            async with asyncio.timeout_at(self._end_deadline):
                return await self._response.content.readany()
        except (TimeoutError, aiohttp.ClientError):
            return b""


def make_status_error(path: str, status: int, content: bytes, retry_after: str = "") -> ServerStatusError:
    """Build the error. `retry_after`: seconds; a date is ignored."""
    retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0
    return ServerStatusError(path, status, extract_error_message(content), retry_after_s)


def extract_error_message(content: bytes) -> str:
    error = parse_error(content)
    return error[1] if error else content[:500].decode(errors="replace")


@contextmanager
def _translate_errors(path: str, timeout_s: float) -> Generator[None, None, None]:
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise ServerUnreachable(f"{path}: {error}", request_sent=False) from error
    except TimeoutError as error:
        raise ServerTimeout(f"{path}: no response within {timeout_s:g} s", timeout_s) from error
    except aiohttp.ClientError as error:
        raise ServerUnreachable(f"{path}: the connection broke ({type(error).__name__})", request_sent=True) from error
