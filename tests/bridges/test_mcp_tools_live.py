"""McpTools with a real MCP server, over stdin and stdout and over HTTP. Each client is a program in .venv-bridges."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.bridges.bridge_servers import MCP_SERVER, BridgeServer, run_client, serving

pytestmark = pytest.mark.bridges
STDIO = {"command": list(MCP_SERVER)}
TOOLS = ["add", "divide", "pid", "variable", "header", "wait", "picture", "captioned"]


@pytest.fixture
def server() -> Iterator[BridgeServer]:
    with serving(*MCP_SERVER, "http") as each:
        yield each


@pytest.fixture(params=["stdio", "http"])
def parameters(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the parameters of McpTools for each transport."""
    if request.param == "stdio":
        return STDIO
    return {"url": f"{request.getfixturevalue('server').url}/mcp"}


def test_the_tools_are_described_without_a_session(parameters: dict[str, Any]) -> None:
    described = run_client("describe", **parameters)
    assert [tool["name"] for tool in described["tools"]] == TOOLS
    add, divide = described["tools"][:2]
    assert add["description"] == "Add a number to the session's counter."
    assert divide["parameters"]["type"] == "object"
    assert divide["parameters"]["required"] == ["a", "b"]
    assert divide["parameters"]["properties"]["a"]["type"] == "number"
    assert described["children"] == []


def test_only_selected_tools_are_described() -> None:
    described = run_client("describe", **STDIO, tools=["divide", "add"])
    assert [tool["name"] for tool in described["tools"]] == ["divide", "add"]


def test_an_unknown_selected_tool_is_refused_with_the_known_tools() -> None:
    name, text = run_client("fail_to_describe", **STDIO, tools=["add", "multiply"])
    assert name == "ValueError"
    assert "has no tool multiply; it has add, divide, pid" in text


def test_results_and_tool_errors_are_texts_for_the_model() -> None:
    results = run_client("call_all", **STDIO, variables={"COLOR": "blue"})
    assert results["sum"] == "1.5"
    assert results["variable"] == "blue"
    assert results["captioned"] == "a cat\n[The tool returned image; only text is supported.]"
    assert results["picture"] == ["McpToolError", "The tool returned image; only text is supported."]
    assert results["failed"] == ["McpToolError", "Error executing tool divide: division by zero"]
    assert results["unknown"] == ["McpToolError", "Unknown tool: multiply"]
    name, text = results["unsuitable"]
    assert name == "McpToolError"
    assert "valid integer" in text


def test_headers_are_sent_with_each_request(server: BridgeServer) -> None:
    results = run_client("call_all", url=f"{server.url}/mcp", headers={"X-Color": "red"})
    assert results["header"] == "red"
    assert results["failed"] == ["McpToolError", "Error executing tool divide: division by zero"]


def test_state_persists_in_a_session_and_is_separate_between_sessions(parameters: dict[str, Any]) -> None:
    assert run_client("use_two_sessions", **parameters) == ["1", "10", "2", "20", "100"]


def test_a_session_stays_usable_after_a_cancelled_call(parameters: dict[str, Any]) -> None:
    assert run_client("cancel_call", **parameters) == ["1", "TimeoutError", "2"]


def test_a_server_that_is_killed_during_a_call_is_a_fault(parameters: dict[str, Any]) -> None:
    lost = run_client("lose_server", **parameters)
    assert [name for name, _ in lost["errors"]] == ["Fault", "Fault", "Fault"]
    assert all("MCP server" in text for _, text in lost["errors"])
    if "url" in parameters:  # a command starts again
        assert lost["reset"][0] == "Fault"
        assert "did not start a session" in lost["reset"][1]


def test_a_server_that_is_killed_between_calls_is_a_fault(parameters: dict[str, Any]) -> None:
    errors = run_client("lose_server_between_calls", **parameters)
    assert [name for name, _ in errors] == ["Fault", "Fault"]


def test_a_session_of_a_restarted_server_is_a_fault_until_a_reset(server: BridgeServer) -> None:
    restart = [*MCP_SERVER, "http", str(server.port)]
    error, count = run_client("outlive_server", url=f"{server.url}/mcp", restart=restart)
    assert error[0] == "Fault"
    assert count == "1"


def test_close_ends_the_process_of_each_session() -> None:
    num_open, num_closed, again = run_client("close_sessions", **STDIO)
    assert (num_open, num_closed) == (2, 0)
    assert again[0] == "Fault"


def test_a_cancelled_close_still_ends_the_process() -> None:
    assert run_client("cancel_close", **STDIO) == [True, 0]


def test_close_ends_a_process_that_never_speaks_mcp() -> None:
    assert run_client("cancel_reset", command=["sleep", "1000"]) == ["TimeoutError", 1, 0]


@pytest.mark.parametrize("command", [["no-such-program"], ["false"]])
def test_a_command_that_does_not_start_a_server_is_a_fault(command: list[str]) -> None:
    name, text = run_client("fail_to_describe", command=command)
    assert name == "Fault"
    assert f"MCP server {command[0]} did not start a session" in text


def test_the_fault_has_the_last_output_lines_of_a_dead_server() -> None:
    died = ["sh", "-c", "echo starting >&2; echo 'archive.db: no such file' >&2; exit 3"]
    name, text = run_client("fail_to_describe", command=died)
    assert name == "Fault"
    assert text.endswith("; its last lines: starting | archive.db: no such file")
