"""A server that cannot start or exits before it is ready; shell scripts replace interpreters."""

import asyncio
import gc
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from asterism.engine.contract import EngineFailure
from asterism.engine.sglang.server.compatibility import ServerUnusable
from asterism.engine.sglang.server.interpreter_check import run_python, wait_for_free_port
from asterism.engine.sglang.server.managed_server import SGLangServer
from tests.engine.sglang.server.requirements import make_requirements
from tests.processes import is_running

pytestmark = pytest.mark.slow


def write_interpreter(folder: Path, behaviour: str, version: str = "0.5.23") -> str:
    """Write a program that prints this SGLang version, and runs `behaviour` as a server."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then echo {version}; exit; fi\n{behaviour}\n')
    script.chmod(0o755)
    return str(script)


def make_server(folder: Path, python: str, port: int, start_s: float = 60.0) -> SGLangServer:
    given = make_requirements(python=python, port=port, startup_timeout_s=start_s)
    return SGLangServer(given, log=folder / "sglang-0.log", scratch=folder / "scratch")


def test_a_missing_interpreter_is_refused_by_key(tmp_path: Path, port: int):
    missing = str(tmp_path / "none")
    with pytest.raises(ServerUnusable, match=f"^sglang.python = {missing}: cannot be run: No such file or directory$"):
        asyncio.run(make_server(tmp_path, missing, port).start())


def test_an_interpreter_without_sglang_is_refused_with_the_supported_versions(tmp_path: Path, port: int):
    with pytest.raises(ServerUnusable, match=r"^sglang.python = .*: has no SGLang 0.5.23 \(.*PackageNotFoundError.*\)"):
        asyncio.run(make_server(tmp_path, sys.executable, port).start())


def test_an_unsupported_version_is_refused_before_the_server_starts(tmp_path: Path, port: int):
    python = write_interpreter(tmp_path, "touch started", version="0.4.1")
    with pytest.raises(ServerUnusable, match=r": has SGLang 0.4.1; supported: 0.5.23$"):
        asyncio.run(make_server(tmp_path, python, port).start())
    assert not (tmp_path / "sglang-0.log").exists()


def test_a_port_in_use_is_refused_by_key(port: int):
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ServerUnusable, match=r"^sglang.port: .* is in use"):
        asyncio.run(wait_for_free_port("127.0.0.1", port, timeout_s=0))


@pytest.mark.parametrize(
    ("host", "problem"), [("no.such.invalid", "Name or service|Temporary failure"), ("192.0.2.1", "Cannot assign")]
)
def test_a_host_that_is_not_this_machine_is_refused(host: str, problem: str, port: int):
    with pytest.raises(ServerUnusable, match=rf"^host {host}, port {port}: ({problem})"):
        asyncio.run(wait_for_free_port(host, port, timeout_s=0))


def test_the_start_waits_for_a_port_to_become_free(port: int):
    async def scenario() -> None:
        listener = socket.create_server(("127.0.0.1", port))
        waiting = asyncio.create_task(wait_for_free_port("127.0.0.1", port))
        await asyncio.sleep(0)
        assert not waiting.done()
        listener.close()
        await waiting

    asyncio.run(scenario())


def test_a_server_that_exits_immediately_fails_with_its_last_log_lines(tmp_path: Path, port: int):
    dying = make_server(tmp_path, write_interpreter(tmp_path, "echo out of memory >&2; exit 3"), port)
    with pytest.raises(EngineFailure) as caught:
        asyncio.run(dying.start())
    assert "the SGLang server sglang-0 ended with exit code 3:\nout of memory\n" in str(caught.value)
    assert str(tmp_path / "sglang-0.log") in str(caught.value)
    assert not (tmp_path / "scratch").exists()


def test_arguments_that_the_server_rejects_are_a_configuration_error(tmp_path: Path, port: int):
    dying = make_server(
        tmp_path, write_interpreter(tmp_path, "echo error: unrecognized arguments: --fast; exit 2"), port
    )
    with pytest.raises(ServerUnusable, match=r"^sglang.arguments: .*\nerror: unrecognized arguments: --fast\n"):
        asyncio.run(dying.start())


def test_a_start_timeout_names_the_key(tmp_path: Path, port: int):
    slow = make_server(tmp_path, write_interpreter(tmp_path, "exec sleep 1000"), port, start_s=0.01)
    with pytest.raises(
        EngineFailure, match=r"^the SGLang server sglang-0 was not ready within sglang.startup_timeout_s = 0.01:"
    ):
        asyncio.run(slow.start())
    assert not (tmp_path / "scratch").exists()


def test_cancelling_a_start_kills_all_processes_of_the_server(tmp_path: Path, port: int):
    pid_pipe = tmp_path / "pids"
    os.mkfifo(pid_pipe)
    behaviour = f"sleep 1000 & echo $$ $! > {pid_pipe}; wait"

    async def scenario() -> list[int]:
        starting = make_server(tmp_path, write_interpreter(tmp_path, behaviour), port)
        task = asyncio.create_task(starting.start())
        pids = await asyncio.to_thread(pid_pipe.read_text)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        return [int(pid) for pid in pids.split()]

    pids = asyncio.run(scenario())
    assert len(pids) == 2
    assert [pid for pid in pids if is_running(pid)] == []
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize("num_iterations", range(0, 24, 2))
def test_a_cancelled_check_leaves_no_process_and_no_open_pipe(tmp_path: Path, num_iterations: int):
    """Cancelled after this many iterations of the event loop: before, during and after the start of the process."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $$ >> {tmp_path}/pids\necho $! >> {tmp_path}/pids\nwait\n")
    script.chmod(0o755)

    async def scenario() -> None:
        task = asyncio.create_task(run_python(str(script), "", {}))
        for _ in range(num_iterations):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    gc.collect()  # an open transport is a ResourceWarning, which fails the test
    pids = tmp_path / "pids"
    for pid in pids.read_text().split() if pids.exists() else []:
        while is_running(int(pid)):  # a killed process closes its pipes before it ends
            time.sleep(0.01)


def test_a_server_that_was_never_started_can_be_closed(tmp_path: Path, port: int):
    asyncio.run(make_server(tmp_path, sys.executable, port).close())
