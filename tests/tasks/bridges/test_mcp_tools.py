"""McpTools without a server: parameters, the optional package, and results. See tests/bridges for real servers."""

import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from asterism.tasks.bridges import mcp_tools
from asterism.tasks.bridges.mcp_session import McpCallResult, McpToolError
from asterism.tasks.bridges.mcp_tools import McpTools
from asterism.tasks.contract import Fault


def make_result(*blocks: Mapping[str, object], is_error: bool = False, structured: object = None) -> McpCallResult:
    content = [SimpleNamespace(**block) for block in blocks]
    return cast(McpCallResult, SimpleNamespace(content=content, structured_content=structured, is_error=is_error))


def render(result: McpCallResult) -> str:
    return mcp_tools._render(result)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "exactly one of the parameters `command` and `url`"),
        ({"command": []}, "exactly one of the parameters `command` and `url`"),
        ({"command": ["server"], "url": "http://host/mcp"}, "exactly one of the parameters `command` and `url`"),
        ({"url": "host:8000/mcp"}, "`url` must start with http"),
        ({"url": "http://host/mcp", "variables": {"A": "1"}}, "`variables` are environment variables of `command`"),
        ({"command": ["server"], "headers": {"A": "1"}}, "`headers` are HTTP headers of requests to `url`"),
    ],
)
def test_unsuitable_parameters_are_refused_by_name(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        McpTools(**parameters)


def test_a_missing_package_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ImportError, match=r"needs the package mcp; pip install 'asterism\[mcp\]'"):
        McpTools(command=["server"])


def test_an_old_package_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", ModuleType("mcp"))
    monkeypatch.setattr(mcp_tools.metadata, "version", {"mcp": "1.30.0"}.__getitem__)
    with pytest.raises(ImportError, match=r"needs mcp 2; this is 1\.30\.0"):
        McpTools(command=["server"])


async def test_a_call_without_reset_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("mcp")
    package.MCPError = RuntimeError  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "mcp", package)
    tools = McpTools(command=["server", "--quick"])
    with pytest.raises(Fault, match="MCP server server --quick has no open session; call reset first"):
        await tools.call_tool("add", {})
    await tools.close()


def test_the_text_of_all_blocks_is_the_result() -> None:
    file = {"type": "resource", "resource": SimpleNamespace(text="body")}
    link = {"type": "resource_link", "uri": "file:///a"}
    assert render(make_result({"type": "text", "text": "first"}, file, link)) == "first\nbody\nfile:///a"
    assert render(make_result()) == ""


def test_structured_content_is_the_result_if_there_are_no_blocks() -> None:
    assert render(make_result(structured={"sum": "3 €"})) == '{"sum": "3 €"}'
    assert render(make_result({"type": "text", "text": "3"}, structured={"sum": 3})) == "3"


def test_a_result_with_other_media_is_an_error_unless_it_contains_text() -> None:
    image, file = {"type": "image"}, {"type": "resource", "resource": SimpleNamespace(blob="AAAA")}
    with pytest.raises(McpToolError, match="The tool returned image, resource; only text is supported"):
        render(make_result(image, file))
    assert render(make_result({"type": "text", "text": "a cat"}, image)).startswith("a cat\n[The tool returned image;")


def test_an_error_of_a_tool_is_raised_with_its_text() -> None:
    with pytest.raises(McpToolError, match=r"^no such page$"):
        render(make_result({"type": "text", "text": "no such page"}, is_error=True))
    with pytest.raises(McpToolError, match="failed without a message"):
        render(make_result(is_error=True))
