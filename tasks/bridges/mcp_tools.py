"""An MCP server as an environment: the task has the server's tools, and each rollout has its own MCP session.

    import = "asterism.tasks.bridges.mcp_tools:McpTools"
    parameters = { command = ["python", "/opt/archive/server.py"] }

An instance imports the package `mcp` when it is created. The file imports only the standard library and tasks/.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from importlib import import_module, metadata
from typing import Any, cast

from asterism.tasks.bridges.bounded_http import PLAIN, make_response_hook
from asterism.tasks.bridges.mcp_session import McpBlock, McpCallResult, McpClient, McpSession, McpToolError, StderrTail
from asterism.tasks.contract import Fault

_CONNECT_LIMIT_S = 30.0
_SILENCE_LIMIT_S = 300.0  # longest silence of an HTTP server during a call; the limit of the task is lower
_HANDSHAKE = "legacy"  # mcp's name for protocol versions with sessions; the version 2026-07-28 has none
_NEEDS_MCP = "McpTools needs the package mcp; pip install 'asterism[mcp]'"


class McpTools:
    """The tools of an MCP server. Exactly one of `command` and `url` selects the server.

    command: program and arguments of a server on stdin and stdout. Each rollout starts its own process.
    url: endpoint of a running server (streamable HTTP). Each rollout opens its own session.
    variables: environment variables of the command, which inherits only a few, such as HOME and PATH.
    headers: HTTP headers of each request to the URL.
    tools: names of the tools that the model may use; None: all tools of the server.
    """

    replayable = False  # calls can have effects outside the session

    def __init__(
        self,
        command: list[str] | None = None,
        url: str = "",
        variables: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        tools: list[str] | None = None,
    ) -> None:
        """Check the parameters. Raises ValueError, and ImportError without the package mcp."""
        if bool(command) == bool(url):
            raise ValueError("set exactly one of the parameters `command` and `url`")
        if url and not url.startswith(("http://", "https://")):
            raise ValueError(f"`url` must start with http:// or https://; got {url!r}")
        if variables and not command:
            raise ValueError("`variables` are environment variables of `command`; remove them, or set `command`")
        if headers and not url:
            raise ValueError("`headers` are HTTP headers of requests to `url`; remove them, or set `url`")
        self._command, self._url, self._tools = command or [], url, tools
        self._variables, self._headers = variables or {}, headers or {}
        self._mcp = _import_mcp()
        self._server = f"MCP server {url or ' '.join(self._command)}"
        self._session: McpSession | None = None

    async def describe_tools(self) -> list[dict[str, Any]]:
        """Return name, description and parameters of each tool. Raises Fault, and ValueError for an unknown tool."""
        session = self._session or self._create_session()
        try:
            if session is not self._session:
                await session.open()
            listed = await session.list_tools()
        finally:
            if session is not self._session:
                await session.close()
        known = {tool.name: tool for tool in listed}
        names = list(known) if self._tools is None else self._tools
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"`tools`: {self._server} has no tool {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
            )
        return [
            {
                "name": name,
                "description": known[name].description or "",
                "parameters": {"type": "object", "properties": {}, **known[name].input_schema},
            }
            for name in names
        ]

    async def reset(self, **row: Any) -> None:
        """Open the session of the rollout. The server does not receive the row. Raises Fault."""
        await self.close()  # closes a session that an earlier reset failed to open
        self._session = self._create_session()
        await self._session.open()

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool. Raises McpToolError with text for the model, and Fault if the connection is lost."""
        if self._session is None:
            raise Fault(f"{self._server} has no open session; call reset first")
        return _render(await self._session.call_tool(name, arguments))

    async def close(self) -> None:
        """End the session, and the process of a command."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _create_session(self) -> McpSession:
        tail = StderrTail()
        streams = self._connect_http() if self._url else self._start_command(tail)
        client: AbstractAsyncContextManager[McpClient] = self._mcp.Client(streams, mode=_HANDSHAKE)
        return McpSession(client, self._server, self._mcp.MCPError, tail)

    @asynccontextmanager
    async def _start_command(self, tail: StderrTail) -> AsyncGenerator[Any]:
        stdio = cast(Any, import_module("mcp.client.stdio"))
        program, *arguments = self._command
        server = self._mcp.StdioServerParameters(command=program, args=arguments, env=self._variables)
        async with tail.open() as errors, stdio.stdio_client(server, errlog=errors) as streams:
            yield streams

    @asynccontextmanager
    async def _connect_http(self) -> AsyncGenerator[Any]:
        httpx2, transport = cast(Any, import_module("httpx2")), cast(Any, import_module("mcp.client.streamable_http"))
        timeout = httpx2.Timeout(_CONNECT_LIMIT_S, read=_SILENCE_LIMIT_S)
        options = {"timeout": timeout, "verify": _create_tls_context(), "follow_redirects": False}
        hooks = {"response": [make_response_hook(httpx2)]}
        async with (
            httpx2.AsyncClient(headers={**PLAIN, **self._headers}, event_hooks=hooks, **options) as client,
            transport.streamable_http_client(self._url, http_client=client) as streams,
        ):
            yield streams


@cache
def _create_tls_context() -> Any:
    """Create the context that all sessions share, because reading the certificates takes 60 ms."""
    return cast(Any, import_module("httpx2")).create_ssl_context()


def _import_mcp() -> Any:
    try:
        mcp = cast(Any, import_module("mcp"))
    except ModuleNotFoundError as error:
        raise ImportError(_NEEDS_MCP) from error
    if not hasattr(mcp, "MCPError"):
        raise ImportError(f"{_NEEDS_MCP}. It needs mcp 2; this is {metadata.version('mcp')}")
    return mcp


def _render(result: McpCallResult) -> str:
    """Return the text of the result. Raises McpToolError if the tool failed, or returned only other media."""
    texts: list[str] = []
    media: list[str] = []
    for block in result.content:
        text = _extract_text(block)
        if text is None:
            media.append(block.type)
        else:
            texts.append(text)
    if media:
        notice = f"The tool returned {', '.join(media)}; only text is supported."
        if not texts:
            raise McpToolError(notice)
        texts.append(f"[{notice}]")
    if not texts and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(texts)
    if result.is_error:
        raise McpToolError(text or "The tool failed without a message.")
    return text


def _extract_text(block: McpBlock) -> str | None:
    """Return the text of the block, or None for images, audio and binary resources."""
    match block.type:
        case "text":
            return block.text
        case "resource":
            return getattr(block.resource, "text", None)
        case "resource_link":
            return str(block.uri)
        case _:
            return None
