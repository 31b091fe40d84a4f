"""`asterism sandbox` runs over real processes with the process backend."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from asterism.actors.cli import sandbox_commands
from asterism.actors.sandbox_service import sandbox_client
from asterism.bus.messages import CodeRequested
from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.load_test import PRINT
from tests.actors.cli.chat.terminals import in_terminal
from tests.actors.cli.invoking import invoke, read_output, read_refusal
from tests.actors.runs.running import ASTERISM, ROOT, asterism_output, wait_until

pytestmark = pytest.mark.slow

PROCESS = ("--set", "sandbox.backend=process")
NO_ENGINE = "unix:///nowhere/docker.sock"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [*ASTERISM, "sandbox", "serve", "--at", str(folder), *PROCESS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as server:
        assert server.stdout is not None
        assert any("sandbox.started" in line for line in server.stdout)
        try:
            yield server
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)


def test_the_shell_keeps_names_and_prints_what_a_model_would_read() -> None:
    shown = read_output("sandbox", "shell", *PROCESS, typed="x = 40\nx + 2\n1/0\nx\n")
    assert "stdout:\n42\n" in shown
    assert 'File "<cell>", line 1, in <module>\nZeroDivisionError: division by zero' in shown
    assert "stdout:\n40\n" in shown


def test_an_interrupt_ends_a_waiting_shell() -> None:
    with in_terminal([*ASTERISM, "sandbox", "shell", *PROCESS], ROOT, {}) as shell:
        shell.wait_for(">>> ")
        shell.process.send_signal(signal.SIGINT)
        assert shell.wait_for_end() != 0


def test_clients_of_a_served_sandbox_are_separate_and_no_socket_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_commands, "_BENCHMARK_CALLS", (PRINT,))  # the other calls import packages for seconds
    with served(tmp_path) as server:
        assert "42" in read_output("sandbox", "shell", "--at", tmp_path, typed="x = 40\nx + 2\n")
        other = read_output("sandbox", "shell", "--at", tmp_path, typed="x\n")
        bench = read_output("sandbox", "bench", "--at", tmp_path, "--seconds", 1)
        again = read_refusal("sandbox", "serve", "--at", tmp_path, *PROCESS)
    assert server.returncode == 0
    assert "NameError: name 'x' is not defined" in other
    assert json.loads(bench.splitlines()[-1])["print_16_per_s"] > 0
    assert "a sandbox is served there already" in again
    assert list(tmp_path.iterdir()) == []


def test_a_server_removes_ended_clients_and_ends_without_its_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    names = iter(range(1, 100))
    monkeypatch.setattr(sandbox_client.os, "getpid", lambda: next(names))

    async def come_and_go() -> None:
        for number in range(20):
            client = sandbox_client.SandboxClient(tmp_path)
            await client.run(CodeRequested(7, 0, "jupyter_code", "1", ""))
            if number == 0:
                await client.__aexit__(None, None, None)
                descriptors.append(count_descriptors())
            elif number % 2:
                await client.__aexit__(None, None, None)
            else:  # close the bus without a message to the server, like a killed client
                client._receive_task.cancel()  # pyright: ignore[reportPrivateUsage]
                client._watch_task.cancel()  # pyright: ignore[reportPrivateUsage]
                await client._bus.close()  # pyright: ignore[reportPrivateUsage]

    def count_descriptors() -> int:
        return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))

    descriptors: list[int] = []
    with served(tmp_path) as server:
        asyncio.run(come_and_go())
        wait_until(lambda: list(tmp_path.glob("client-*")) == [], server)
        wait_until(lambda: count_descriptors() <= descriptors[0], server)
        for path in tmp_path.iterdir():
            path.unlink()
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def test_a_killed_server_is_reported_to_the_client(tmp_path: Path) -> None:
    command = [*ASTERISM, "sandbox", "shell", "--at", str(tmp_path)]
    with served(tmp_path) as server, in_terminal(command, ROOT, {}) as shell:
        shell.enter("1 + 1\n", "stdout:\n2\n")
        server.kill()
        server.wait()
        shell.enter("1 + 1\n", "infrastructure: the sandbox server has ended")


def test_a_missing_docker_engine_has_a_remedy() -> None:
    result = invoke("sandbox", "shell", "--set", "sandbox.backend=docker", DOCKER_HOST=NO_ENGINE)
    assert isinstance(result.exception, SandboxFailure)
    assert f"no engine at {NO_ENGINE}. Install Docker Engine" in str(result.exception)


def test_auto_without_docker_falls_back_to_processes() -> None:
    shown = read_output("sandbox", "doctor", "--set", "sandbox.time_limit_s=1", DOCKER_HOST=NO_ENGINE)
    assert "backend: process" in shown
    assert "No containers: no Docker engine" in shown
    assert "ESCAPED" not in shown


@pytest.mark.docker
def test_containers_contain_every_escape_attempt() -> None:
    settings = ("--set", "sandbox.backend=docker", "--set", "sandbox.time_limit_s=1")
    shown = asterism_output("sandbox", "doctor", *settings)
    assert "backend: docker" in shown
    assert "ESCAPED" not in shown
