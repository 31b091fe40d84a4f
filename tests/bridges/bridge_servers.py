"""Finds the environment of these tests, and starts servers and client programs in it.

The servers and the client programs run in .venv-bridges; the tests themselves run in .venv.
"""

import json
import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
PYTHON = ROOT / ".venv-bridges" / "bin" / "python"
MCP_SERVER = (str(PYTHON), str(FOLDER / "mcp_server.py"))
OPENENV_SERVER = (str(PYTHON), str(FOLDER / "openenv_server.py"))
CLIENT_LIMIT_S = 120.0


class BridgeServer:
    """A server that prints its loopback port on the first line."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def serving(*command: str) -> Generator[BridgeServer]:
    server = BridgeServer(*command)
    try:
        yield server
    finally:
        server.kill()


def run_client(scenario: str, **parameters: Any) -> Any:
    """Run a scenario of mcp_scenarios.py with `parameters` of McpTools. Return the JSON value that it prints."""
    program = str(FOLDER / "mcp_scenarios.py")
    finished = subprocess.run(
        [str(PYTHON), program, scenario, json.dumps(parameters)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=CLIENT_LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)
