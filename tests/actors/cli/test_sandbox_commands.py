"""`asterism sandbox` runs over real processes with the process backend."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from asterism.actors.sandbox_service import sandbox_client
from asterism.bus.messages import CodeRequested
from tests.actors.runs.running import ASTERISM, wait_until

pytestmark = pytest.mark.slow

PROCESS = ["--set", "sandbox.backend=process"]


def asterism(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    command, env = [*ASTERISM, "sandbox", *arguments], {**os.environ, **environ}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, env=env)


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
    shell = asterism("shell", *PROCESS, stdin="x = 40\nx + 2\n1/0\nx\n")
    assert shell.returncode == 0, shell.stderr
    assert "stdout:\n42\n" in shell.stdout
    assert 'File "<cell>", line 1, in <module>\nZeroDivisionError: division by zero' in shell.stdout
    assert "stdout:\n40\n" in shell.stdout


def test_an_interrupt_ends_a_waiting_shell() -> None:
    ours, theirs = pty.openpty()
    command = [*ASTERISM, "sandbox", "shell", *PROCESS]
    try:
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT) as shell:
            seen = b""
            while b">>> " not in seen:
                seen += os.read(ours, 1024)
            shell.send_signal(signal.SIGINT)
            assert shell.wait(30) != 0
    finally:
        os.close(ours)
        os.close(theirs)


def test_clients_of_a_served_sandbox_are_separate_and_no_socket_remains(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        first = asterism("shell", "--at", str(tmp_path), stdin="x = 40\nx + 2\n")
        second = asterism("shell", "--at", str(tmp_path), stdin="x\n")
        bench = asterism("bench", "--at", str(tmp_path), "--seconds", "2")
        again = asterism("serve", "--at", str(tmp_path), *PROCESS)
    assert server.returncode == 0
    assert "42" in first.stdout
    assert "NameError: name 'x' is not defined" in second.stdout
    assert json.loads(bench.stdout.splitlines()[-1])["print_16_per_s"] > 0
    assert again.returncode == 2
    assert "a sandbox is served there already" in again.stderr
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
    with (
        served(tmp_path) as server,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell,
    ):
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.write("1 + 1\n")
        shell.stdin.flush()
        assert any("2" in line for line in shell.stdout)
        server.kill()
        server.wait()
        output, _ = shell.communicate("1 + 1\n", timeout=60)
    assert "infrastructure: the sandbox server has ended" in output


def test_a_missing_docker_engine_has_a_remedy() -> None:
    shell = asterism("shell", "--set", "sandbox.backend=docker", DOCKER_HOST="unix:///nowhere/docker.sock")
    assert shell.returncode == 2
    assert "no engine at unix:///nowhere/docker.sock. Install Docker Engine" in shell.stderr


def test_auto_without_docker_falls_back_to_processes() -> None:
    doctor = asterism("doctor", "--set", "sandbox.time_limit_s=1", DOCKER_HOST="unix:///nowhere/docker.sock")
    assert doctor.returncode == 0, doctor.stdout
    assert "backend: process" in doctor.stdout
    assert "No containers: no Docker engine" in doctor.stdout
    assert "ESCAPED" not in doctor.stdout


@pytest.mark.docker
def test_containers_contain_every_escape_attempt() -> None:
    doctor = asterism("doctor", "--set", "sandbox.backend=docker", "--set", "sandbox.time_limit_s=1")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert "backend: docker" in doctor.stdout
    assert "ESCAPED" not in doctor.stdout
