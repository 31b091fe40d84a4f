"""An MCP server with a counter for each session. `mcp_server.py` serves stdin and stdout; `mcp_server.py http [PORT]`
serves HTTP on a loopback port, and prints the port.

Runs in .venv-bridges.
"""

# Types are checked in .venv, which lacks these packages.
# pyright: basic, reportMissingImports=false

import asyncio
import os
import socket
import sys
from collections import Counter

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ImageContent, TextContent

server = MCPServer("counter", log_level="ERROR")
counts: Counter[str] = Counter()  # by session


@server.tool()
def add(number: int, context: Context) -> str:
    """Add a number to the session's counter."""
    session = (context.headers or {}).get("mcp-session-id", "")
    counts[session] += number
    return str(counts[session])


@server.tool()
def divide(a: float, b: float) -> float:
    """Divide two numbers."""
    if b == 0:
        raise ToolError("division by zero")
    return a / b


@server.tool()
def pid() -> str:
    """The process id of the server."""
    return str(os.getpid())


@server.tool()
def variable(name: str) -> str:
    """An environment variable of the server."""
    return os.environ.get(name, "")


@server.tool()
def header(name: str, context: Context) -> str:
    """A header of the request."""
    return (context.headers or {}).get(name, "")


@server.tool()
async def wait() -> str:
    """Wait forever."""
    await asyncio.Event().wait()
    return ""


@server.tool(structured_output=False)
def picture() -> ImageContent:
    """An image."""
    return ImageContent(type="image", data="AAAA", mime_type="image/png")


@server.tool(structured_output=False)
def captioned() -> list[TextContent | ImageContent]:
    """An image with a caption."""
    return [TextContent(type="text", text="a cat"), picture()]


def main() -> None:
    if sys.argv[1:2] != ["http"]:
        server.run("stdio")
        return
    port = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    listener = socket.create_server(("127.0.0.1", port))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(server.streamable_http_app(), log_level="error")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
