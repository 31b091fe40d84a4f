"""A session of an OpenEnv server: one WebSocket, on which each request has one answer.

The client sends {"type": "reset" | "step" | "close", "data": {...}}. The server sends
{"type": "observation" | "error", "data": {...}}. A server without a free session sends an error, and closes.
"""

import asyncio
import re
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from asterism.tasks.bridges.bounded_http import PLAIN, ResponseRefused, read_bounded, refuse_redirects
from asterism.tasks.contract import Fault

_CLOSE_LIMIT_S = 3.0
_CLOSE_TIMEOUT = aiohttp.ClientWSTimeout(ws_close=_CLOSE_LIMIT_S)  # pyright: ignore[reportCallIssue]  # of attrs
_MAX_FRAME_BYTES = 1 << 24
# Errors of a step that the model's action can have caused; the session continues.
_REFUSALS = ("VALIDATION_ERROR", "EXECUTION_ERROR")
_AT_CAPACITY = "CAPACITY_REACHED"

_checked: set[tuple[str, str]] = set()  # pairs of URL and action field that this process has checked


class ActionRefused(Exception):
    """The environment refused a request; the session continues. The message comes from the server."""


class EnvironmentStep(msgspec.Struct, frozen=True):
    observation: dict[str, Any]
    done: bool = False
    reward: bool | float | None = None


class ErrorDetails(msgspec.Struct, frozen=True):
    message: str = ""
    code: str = ""
    errors: list[dict[str, Any]] = []  # pydantic's errors for an action that does not fit the schema
    max_sessions: int | None = None


class ObservationFrame(msgspec.Struct, frozen=True, tag_field="type", tag="observation"):
    data: EnvironmentStep


class ErrorFrame(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    data: ErrorDetails


_decoder = msgspec.json.Decoder(ObservationFrame | ErrorFrame)


class OpenEnvSession:
    def __init__(self, url: str, time_limit_s: float) -> None:
        self.url = re.sub("^ws", "http", url.rstrip("/").removesuffix("/ws"))
        self._limit_s = time_limit_s
        self._client: aiohttp.ClientSession | None = None
        self._websocket: aiohttp.ClientWebSocketResponse | None = None
        self._awaits_answer = False  # stays true after a cancelled request, whose answer the next request would receive

    async def open(self, action_field: str) -> None:
        """Connect. Raises Fault, also if the server's actions lack the field."""
        await self.close()  # closes a session that an earlier call failed to open
        self._client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._limit_s), headers=PLAIN, middlewares=(refuse_redirects,)
        )
        try:
            if (self.url, action_field) not in _checked:
                await self._check_action_field(self._client, action_field)
                _checked.add((self.url, action_field))
            async with asyncio.timeout(self._limit_s):
                self._websocket = await self._client.ws_connect(
                    f"{self.url}/ws", max_msg_size=_MAX_FRAME_BYTES, timeout=_CLOSE_TIMEOUT
                )
        except ResponseRefused as error:
            raise Fault(f"{self.url}: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Fault(f"{self.url}: cannot connect: {type(error).__name__}: {error}") from error

    async def _check_action_field(self, client: aiohttp.ClientSession, action_field: str) -> None:
        """Check the field against the schema of actions, if the server has a schema. Raises Fault."""
        async with client.get(f"{self.url}/schema") as response:
            body = await read_bounded(response) if response.status == 200 else b"{}"
        try:
            schema = msgspec.json.decode(body, type=dict[str, Any]).get("action") or {}
        except msgspec.DecodeError:
            return
        properties = schema.get("properties") or {}
        if properties and action_field not in properties and schema.get("additionalProperties") is not True:
            fields = ", ".join(field for field in properties if field != "metadata")
            raise Fault(f"`action_field`: an action of {self.url} has no field {action_field}; it has {fields}")

    async def request(self, kind: str, data: dict[str, Any]) -> EnvironmentStep:
        """Send a request and return the answer. Raises ActionRefused, and Fault if the session becomes unusable."""
        frame = _decode(await self._exchange(msgspec.json.encode({"type": kind, "data": data}).decode()), self.url)
        self._awaits_answer = False
        match frame:
            case ObservationFrame(data=step):
                return step
            case ErrorFrame(data=details) if details.code == _AT_CAPACITY:
                raise Fault(
                    f"{self.url} allows {details.max_sessions or 'no more'} sessions, and all are in use; start the "
                    "server with a max_concurrent_envs of at least the number of concurrent trajectories"
                )
            case ErrorFrame(data=details):
                text = "; ".join([details.message, *(str(each.get("msg", "")) for each in details.errors)])
                if details.code in _REFUSALS:
                    raise ActionRefused(text)
                raise Fault(f"{self.url}: {kind} failed: {details.code}: {text}")

    async def _exchange(self, request: str) -> str:
        """Send the request and return the frame that answers it. Raises Fault."""
        if self._websocket is None or self._awaits_answer:
            raise Fault(f"{self.url}: no usable session, because it was not opened or an earlier request failed")
        self._awaits_answer = True
        try:
            async with asyncio.timeout(self._limit_s):
                with suppress(ConnectionError):  # a server that closed after an error: the error is received next
                    await self._websocket.send_str(request)
                message = await self._websocket.receive()
        except TimeoutError as error:
            raise Fault(f"{self.url}: no answer within {self._limit_s:g} s") from error
        if message.type is aiohttp.WSMsgType.TEXT:
            return message.data
        raise Fault(
            f"{self.url} closed the connection ({message.type.name.lower()}, code {self._websocket.close_code})"
        )

    async def close(self) -> None:
        """Close the session, and wait until the server has closed the environment and freed its place."""
        websocket, self._websocket = self._websocket, None
        client, self._client = self._client, None
        is_idle, self._awaits_answer = not self._awaits_answer, False
        try:
            if websocket is not None and is_idle:
                await self._end(websocket)
        finally:
            try:
                if websocket is not None:
                    await websocket.close()
            finally:
                if client is not None:
                    await client.close()

    async def _end(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        """Wait until the server closes the connection, which it does after closing the environment."""
        with suppress(TimeoutError, ConnectionError):  # the server is not running, or ends the session later
            async with asyncio.timeout(min(self._limit_s, _CLOSE_LIMIT_S)):
                await websocket.send_str('{"type":"close"}')
                while (await websocket.receive()).type is aiohttp.WSMsgType.TEXT:
                    pass


def _decode(text: str, url: str) -> ObservationFrame | ErrorFrame:
    try:
        return _decoder.decode(text)
    except msgspec.DecodeError as error:
        raise Fault(f"{url} sent a malformed frame: {error}: {text[:200]!r}") from error
