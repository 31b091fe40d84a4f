"""Tests of servers that cannot start, or that exit before they are ready. Shell scripts replace the interpreter."""

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
from tests.engine.sglang.server.fake_interpreter import write_script
from tests.engine.sglang.server.requirements import make_requirements
from tests.processes import is_running

pytestmark = pytest.mark.slow


def write_interpreter(folder: Path, behaviour: str, version: str = "0.5.23") -> str:
    """Write a program that prints this version of SGLang, or runs `behaviour` as a server."""
    return write_script(folder, f'#!/bin/sh\nif [ "$1" = -c ]; then echo {version}; exit; fi\n{behaviour}\n')


def make_server(folder: Path, python: str, port: int, start_s: float = 60.0) -> SGLangServer:
    given = make_requirements(python=python, port=port, startup_timeout_s=start_s)
    return SGLangServer(given, log=folder / "sglang-0.log", scratch=folder / "scratch")


@pytest.mark.parametrize(
    ("python", "error", "message"),
    [
        (
            "/no/such/python",
            ServerUnusable,
            "^sglang.python = /no/such/python: cannot be run: No such file or directory$",
        ),
        (sys.executable, ServerUnusable, r"^sglang.python = .*: has no SGLang 0.5.23 \(.*PackageNotFoundError.*\)"),
        ("0.4.1: touch started", ServerUnusable, r": has SGLang 0.4.1; supported: 0.5.23$"),
        (
            "0.5.23: echo error: unrecognized arguments: --fast; exit 2",
            ServerUnusable,
            r"^sglang.arguments: .*\nerror: unrecognized arguments: --fast\n",
        ),
        (
            "0.5.23: echo out of memory >&2; exit 3",
            EngineFailure,
            r"the SGLang server sglang-0 ended with exit code 3:\nout of memory\n(?s:.*)/sglang-0\.log",
        ),
        (
            "0.5.23: exec sleep 1000",
            EngineFailure,
            r"^the SGLang server sglang-0 was not ready within sglang.startup_timeout_s = 0\.3:",
        ),
    ],
    ids=["missing", "without SGLang", "unsupported", "arguments", "ends", "timeout"],
)
def test_the_error_for_a_failed_start_names_the_key_or_shows_the_log(
    tmp_path: Path, port: int, python: str, error: type[Exception], message: str
):
    """A `python` with a colon is a version, and the behaviour of an interpreter that the test writes."""
    version, _, behaviour = python.partition(": ")
    is_scripted, start_s = bool(behaviour), 0.3 if "sleep" in behaviour else 60.0
    starting = make_server(
        tmp_path, write_interpreter(tmp_path, behaviour, version) if is_scripted else python, port, start_s
    )
    with pytest.raises(error, match=message):
        asyncio.run(starting.start())
    assert (tmp_path / "sglang-0.log").exists() == (version == "0.5.23")  # other versions are refused earlier
    assert not (tmp_path / "scratch").exists()


def test_the_error_for_a_port_in_use_names_the_key(port: int):
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ServerUnusable, match=r"^sglang.port: .* is in use"):
        asyncio.run(wait_for_free_port("127.0.0.1", port, timeout_s=0))


@pytest.mark.parametrize(
    ("host", "problem"), [("no.such.invalid", "Name or service|Temporary failure"), ("192.0.2.1", "Cannot assign")]
)
def test_a_host_of_another_machine_is_refused(host: str, problem: str, port: int):
    with pytest.raises(ServerUnusable, match=rf"^host {host}, port {port}: ({problem})"):
        asyncio.run(wait_for_free_port(host, port, timeout_s=0))


def test_a_start_waits_until_the_port_is_free(port: int):
    async def scenario() -> None:
        listener = socket.create_server(("127.0.0.1", port))
        waiting = asyncio.create_task(wait_for_free_port("127.0.0.1", port))
        await asyncio.sleep(0)
        assert not waiting.done()
        listener.close()
        await waiting

    asyncio.run(scenario())


def test_a_cancelled_start_kills_all_processes_of_the_server(tmp_path: Path, port: int):
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
    """The check is cancelled after this many loop iterations: before, during and after the start of the process."""
    pids = tmp_path / "pids"
    script = write_script(tmp_path, f"#!/bin/sh\nsleep 1000 &\necho $$ >> {pids}\necho $! >> {pids}\nwait\n")

    async def scenario() -> None:
        task = asyncio.create_task(run_python(script, "", {}))
        for _ in range(num_iterations):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    gc.collect()  # an open transport causes a ResourceWarning, which fails the test
    for pid in pids.read_text().split() if pids.exists() else []:
        while is_running(int(pid)):  # a killed process closes its pipes before it exits
            time.sleep(0.01)


def test_a_server_that_was_never_started_can_be_closed(tmp_path: Path, port: int):
    asyncio.run(make_server(tmp_path, sys.executable, port).close())
