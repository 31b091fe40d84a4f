"""A server that cannot be started, or ends before it is ready; scripts stand in for interpreters."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest

from engine.contract import EngineFailure
from engine.sglang.fit import ServerUnusable
from engine.sglang.interpreter import wait_for_port
from engine.sglang.server import SGLangServer
from tests.engine.sglang.servers import wanted


@pytest.fixture
def port() -> int:
    """Free as it is asked for."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def interpreter(folder: Path, does: str, version: str = "0.5.23") -> str:
    """A program that says this version of SGLang, and does this as a server."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then echo {version}; exit; fi\n{does}\n')
    script.chmod(0o755)
    return str(script)


def server(folder: Path, python: str, port: int, start_s: float = 60.0) -> SGLangServer:
    given = wanted(python=python, port=port, start_s=start_s)
    return SGLangServer(given, log=folder / "sglang-0.log", scratch=folder / "scratch")


def lives(pid: int) -> bool:
    """Also one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_an_interpreter_that_is_none_is_refused_by_its_key(tmp_path: Path, port: int):
    missing = str(tmp_path / "none")
    with pytest.raises(ServerUnusable, match=f"^sglang.python = {missing}: cannot be run: No such file or directory$"):
        asyncio.run(server(tmp_path, missing, port).start())


def test_an_interpreter_without_sglang_is_refused_with_the_versions_that_are_known(tmp_path: Path, port: int):
    with pytest.raises(ServerUnusable, match=r"^sglang.python = .*: has no SGLang 0.5.23 \(.*PackageNotFoundError.*\)"):
        asyncio.run(server(tmp_path, sys.executable, port).start())


def test_a_version_that_is_not_known_is_refused_before_anything_is_started(tmp_path: Path, port: int):
    python = interpreter(tmp_path, "touch started", version="0.4.1")
    with pytest.raises(ServerUnusable, match=r": has SGLang 0.4.1; known here: 0.5.23$"):
        asyncio.run(server(tmp_path, python, port).start())
    assert not (tmp_path / "sglang-0.log").exists()


def test_a_port_at_which_somebody_listens_is_refused_by_its_key(port: int):
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ServerUnusable, match=r"^sglang.port: .* already"):
        asyncio.run(wait_for_port("127.0.0.1", port, within_s=0))


def test_a_port_that_is_given_back_is_waited_for(port: int):
    async def scenario() -> None:
        listener = socket.create_server(("127.0.0.1", port))
        waiting = asyncio.create_task(wait_for_port("127.0.0.1", port))
        await asyncio.sleep(0)
        assert not waiting.done()
        listener.close()
        await waiting

    asyncio.run(scenario())


def test_a_server_that_ends_at_once_is_a_failure_with_its_last_words(tmp_path: Path, port: int):
    dying = server(tmp_path, interpreter(tmp_path, "echo out of memory >&2; exit 3"), port)
    with pytest.raises(EngineFailure) as caught:
        asyncio.run(dying.start())
    assert "the SGLang server sglang-0 ended with exit code 3:\nout of memory\n" in str(caught.value)
    assert str(tmp_path / "sglang-0.log") in str(caught.value)
    assert not (tmp_path / "scratch").exists()


def test_arguments_that_the_server_does_not_know_are_the_users_to_mend(tmp_path: Path, port: int):
    dying = server(tmp_path, interpreter(tmp_path, "echo error: unrecognized arguments: --fast; exit 2"), port)
    with pytest.raises(ServerUnusable, match=r"^sglang.arguments: .*\nerror: unrecognized arguments: --fast\n"):
        asyncio.run(dying.start())


def test_a_server_that_is_not_ready_in_time_is_a_failure_that_names_the_key(tmp_path: Path, port: int):
    slow = server(tmp_path, interpreter(tmp_path, "exec sleep 1000"), port, start_s=0.01)
    with pytest.raises(EngineFailure, match=r"^the SGLang server sglang-0 was not ready within sglang.start_s = 0.01:"):
        asyncio.run(slow.start())
    assert not (tmp_path / "scratch").exists()


def test_a_start_that_is_cancelled_ends_all_that_the_server_started(tmp_path: Path, port: int):
    told = tmp_path / "told"
    os.mkfifo(told)
    does = f"sleep 1000 & echo $$ $! > {told}; wait"

    async def scenario() -> list[int]:
        starting = server(tmp_path, interpreter(tmp_path, does), port)
        task = asyncio.create_task(starting.start())
        pids = await asyncio.to_thread(told.read_text)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        return [int(pid) for pid in pids.split()]

    pids = asyncio.run(scenario())
    assert len(pids) == 2
    assert [pid for pid in pids if lives(pid)] == []
    assert not (tmp_path / "scratch").exists()


def test_one_that_was_never_started_can_be_closed(tmp_path: Path, port: int):
    asyncio.run(server(tmp_path, sys.executable, port).close())
