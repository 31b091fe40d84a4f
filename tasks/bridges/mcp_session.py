"""One MCP session. One asyncio task opens and closes the client, because anyio requires the same task for both.

Other asyncio tasks may call the methods and cancel the calls; the session stays usable.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TextIO, TypeVar

from asterism.tasks.contract import Fault

Answer = TypeVar("Answer")

_CLOSE_LIMIT_S = 10.0  # mcp kills the process of a server that does not exit within 7 s
_KEPT_BYTES, _SHOWN_LINES = 4096, 3  # bytes of stderr to keep, and lines of stderr in messages
_LAST_WORDS_S = 0.5  # longest wait for bytes that an ended process left in the pipe
_MAX_PAGES = 100  # pages of a list of tools
# JSON-RPC errors that a call of the model cannot cause: parse error, invalid request, method not found,
# connection closed, request timeout. mcp reports HTTP errors as internal errors with the text below.
_LOST_CODES = frozenset({-32700, -32600, -32601, -32000, -32001})
_HTTP_ERROR = "Server returned an error response"

_tasks: set[asyncio.Task[None]] = set()  # strong references to running tasks; asyncio keeps only weak references


class McpToolError(Exception):
    """A tool failed. The tool response contains the message."""


class McpTool(Protocol):
    name: str
    description: str | None
    input_schema: dict[str, Any]


class McpToolPage(Protocol):
    tools: Sequence[McpTool]
    next_cursor: str | None


class McpBlock(Protocol):
    """A block of a result. The type determines which of the other attributes exist."""

    type: str
    text: str
    uri: object
    resource: object


class McpCallResult(Protocol):
    content: Sequence[McpBlock]
    structured_content: Any
    is_error: bool


class McpClient(Protocol):
    """The part of `mcp.Client` that this file uses."""

    async def list_tools(self, *, cursor: str | None = None) -> McpToolPage: ...
    async def call_tool(self, name: str, arguments: dict[str, Any]) -> McpCallResult: ...


class StderrTail(asyncio.Protocol):
    """The last lines of a server process's stderr, which name the cause of its end."""

    def __init__(self) -> None:
        self._kept = b""
        self._ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self._kept = (self._kept + data)[-_KEPT_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[TextIO]:
        """Open a stream for the stderr of a child process. The pipe is read while the context lasts."""
        reading, writing = os.pipe()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(reading, "rb", 0))
        try:
            with os.fdopen(writing, "w") as stream:
                yield stream
            await asyncio.wait((asyncio.ensure_future(self._ended.wait()),), timeout=_LAST_WORDS_S)
        finally:
            transport.close()

    def describe(self) -> str:
        """Return the last lines as a continuation of an error message, or "" without lines."""
        lines = [line for line in self._kept.decode(errors="replace").splitlines() if line.strip()]
        return f"; its last lines: {' | '.join(lines[-_SHOWN_LINES:])}" if lines else ""


class McpSession:
    def __init__(
        self,
        client: AbstractAsyncContextManager[McpClient],
        server: str,
        error_reply: type[Exception],
        tail: StderrTail,
    ) -> None:
        """`server`: name of the server in messages. `error_reply`: the client's exception for a JSON-RPC error.

        `tail`: stderr of a server that the client starts.
        """
        self._connecting, self._server, self._error_reply = client, server, error_reply
        self._opened, self._closing = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._client: McpClient | None = None
        self._tail = tail
        self._failure = ""

    async def open(self) -> None:
        """Connect and initialize the session. Raises Fault."""
        self._task = asyncio.create_task(self._run())
        _tasks.add(self._task)
        self._task.add_done_callback(_tasks.discard)
        await _wait_for_either(asyncio.create_task(self._opened.wait()), self._task)
        if self._client is None:
            raise Fault(f"{self._server} did not start a session: {self._failure}")

    async def _run(self) -> None:
        try:
            async with self._connecting as self._client:
                self._opened.set()
                await self._closing.wait()
        # Foreign code raises errors of processes, sockets, HTTP and the protocol, alone and in groups.
        except Exception as error:
            self._failure = _describe(error) + self._tail.describe()
        finally:
            self._client = None

    async def list_tools(self) -> list[McpTool]:
        """List the tools of all pages of the server's list. Raises Fault."""
        tools: list[McpTool] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            client = self._get_client()
            try:
                page = await self._request(client.list_tools(cursor=cursor))
            except McpToolError as error:
                raise Fault(f"{self._server} does not list its tools: {error}") from error
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise Fault(f"{self._server} lists its tools on more than {_MAX_PAGES} pages")

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> McpCallResult:
        """Call a tool. Raises Fault if the connection is lost, and McpToolError if the server refuses the call."""
        return await self._request(self._get_client().call_tool(name, arguments))

    async def close(self) -> None:
        """Close the session, also while `open` or a call waits."""
        if self._task is None:
            return
        if self._client is None:
            self._task.cancel()
        self._closing.set()
        # Unlike an await, a cancelled asyncio.wait does not cancel the task: the task always finishes.
        done, _ = await asyncio.wait({self._task}, timeout=_CLOSE_LIMIT_S)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CLOSE_LIMIT_S)

    def _get_client(self) -> McpClient:
        if self._client is None:
            raise Fault(f"{self._server} has no open session{self._failure and f': {self._failure}'}")
        return self._client

    async def _request(self, request: Coroutine[Any, Any, Answer]) -> Answer:
        assert self._task is not None
        call = asyncio.create_task(request)
        if not await _wait_for_either(call, self._task):
            raise Fault(f"{self._server} closed the session: {self._failure or self._tail.describe()}")
        try:
            return call.result()
        except self._error_reply as error:
            if getattr(error, "code", 0) in _LOST_CODES or _HTTP_ERROR in str(error):
                raise Fault(f"{self._server} closed the session: {error}{self._tail.describe()}") from error
            raise McpToolError(str(error)) from error
        except RuntimeError as error:  # the result does not have the schema that the tool declares
            raise McpToolError(str(error)) from error
        except Exception as error:  # foreign code raises errors of streams, HTTP and decoding
            raise Fault(f"{self._server} does not answer: {_describe(error)}") from error


async def _wait_for_either(wanted: asyncio.Task[Any], session: asyncio.Task[None]) -> bool:
    """Return whether the wanted task ended. Cancel the task if the session ends first or the caller is cancelled."""
    try:
        await asyncio.wait({wanted, session}, return_when=asyncio.FIRST_COMPLETED)
        return wanted.done()
    finally:
        wanted.cancel()


def _describe(error: BaseException) -> str:
    """Describe the error, or the first error of a group, which is the cause of the group's other errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
