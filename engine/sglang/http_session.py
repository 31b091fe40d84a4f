"""HTTP requests to one inference server: pooled connections, timeouts, retried GETs, typed errors."""

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec

from engine.sglang.http_api import ServerStatusError, ServerTimeout, ServerUnreachable, parse_error, parse_response

Answer = TypeVar("Answer")
CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 2.0  # less than the 5 s after which the server closes an idle connection
_STREAM_END = b"[DONE]"
_JSON_HEADERS = {"Content-Type": "application/json"}


class HttpSession:
    def __init__(
        self,
        base_url: str,
        request_timeout_s: float,
        retry_delays_s: Sequence[float],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`headers`: of each request, such as an authorization."""
        self._headers = {**_JSON_HEADERS, **(headers or {})}
        self.base_url = base_url.rstrip("/")
        self.server_version = ""  # for error messages, once known
        self._request_timeout_s, self._retry_delays_s = request_timeout_s, retry_delays_s
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str) -> bytes:
        """Retries if the connection is refused or breaks."""
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
        """The status, whatever it is, and the response's body."""
        timeout_s = timeout_s or self._request_timeout_s
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        content = None if body is None else io.BytesIO(msgspec.json.encode(body))  # sent in pieces, unlike bytes
        with _translate_errors(path, timeout_s):
            async with self._get_session().request(
                method, path, data=content, headers=self._headers, timeout=timeout
            ) as response:
                return response.status, await response.read()

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The JSON of each server-sent event, or of the one response. The timeout is per piece."""
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, sock_read=self._request_timeout_s)
        with _translate_errors(path, self._request_timeout_s):
            async with self._get_session().post(path, data=body, headers=self._headers, timeout=timeout) as response:
                if response.status != 200:
                    retry_after = response.headers.get("Retry-After", "")
                    raise make_status_error(path, response.status, await response.read(), retry_after)
                if response.content_type == "application/json":
                    yield await response.read()
                    return
                ended = False
                # Read to the end of the body: aiohttp reuses the connection only then.
                async for event in _read_events(response.content):
                    if event == _STREAM_END:
                        ended = True
                    else:
                        yield event
        if not ended:
            raise ServerUnreachable(f"{path}: the stream ended early", request_sent=True)

    def parse(self, content: bytes, kind: type[Answer]) -> Answer:
        return parse_response(content, kind, self.server_version)

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


def make_status_error(path: str, status: int, content: bytes, retry_after: str = "") -> ServerStatusError:
    """`retry_after`: seconds; a date is ignored."""
    retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0
    return ServerStatusError(path, status, extract_error_message(content), retry_after_s)


def extract_error_message(content: bytes) -> str:
    error = parse_error(content)
    return error[1] if error else content[:500].decode(errors="replace")


async def _read_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The text after `data:` of each event, of any length."""
    rest = bytearray()
    async for piece in content.iter_any():
        rest += piece
        if b"\r" in piece:
            rest = rest.replace(b"\r\n", b"\n")
        elif b"\n\n" not in piece and not rest.endswith(b"\n\n"):
            continue
        *events, rest = rest.split(b"\n\n")
        for event in events:
            if not event.startswith(b":"):  # a comment, which keeps the connection alive
                yield bytes(event.removeprefix(b"data:").removeprefix(b" "))


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
