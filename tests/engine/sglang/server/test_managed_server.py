"""Tests of a ready server's processes: if one of them dies, all are killed; `close` kills them, too.

The server is fake and starts quickly. tests/sglang/test_server.py checks that a real server ends
with the process that started it.
"""

import asyncio
import os
import select
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asterism.engine.sglang.server.managed_server import SGLangServer
from tests.engine.sglang.server.fake_interpreter import write_interpreter
from tests.engine.sglang.server.requirements import make_info, make_requirements

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]

WORKER = "sglang::scheduler"


def write_fake_interpreter(folder: Path) -> str:
    return write_interpreter(folder, msgspec.json.encode(make_info()))


def make_server(folder: Path, port: int, ready_s: float = 10.0) -> SGLangServer:
    given = make_requirements(python=write_fake_interpreter(folder), port=port, health_timeout_s=ready_s)
    return SGLangServer(given, log=folder / "sglang-0.log", scratch=folder / "scratch", probe_interval_s=0.05)


def wait_for_end(pidfd: int) -> None:
    select.select([pidfd], [], [])
    os.close(pidfd)


@pytest.mark.parametrize(
    ("stop", "how"),
    [
        (lambda _, worker: os.kill(worker, signal.SIGKILL), f"lost its process {WORKER}"),
        (lambda leader, _: os.kill(leader, signal.SIGKILL), "ended with exit code -9"),
        (lambda leader, _: os.killpg(leader, signal.SIGSTOP), "no longer responds"),
    ],
    ids=["killed worker", "killed leader", "suspended"],
)
async def test_all_processes_of_a_dead_server_are_killed(
    tmp_path: Path, port: int, log_entries: list[Any], stop: Callable[[int, int], None], how: str
):
    one = make_server(tmp_path, port, ready_s=0.2 if how == "no longer responds" else 10.0)
    try:
        assert await one.start() == f"http://127.0.0.1:{port}"
        processes = one.list_processes()
        watched = [os.pidfd_open(pid) for pid in processes]
        leader, worker = sorted(processes, key=lambda pid: processes[pid] == WORKER)
        stop(leader, worker)
        why = await one.death
        await asyncio.to_thread(lambda: [wait_for_end(pidfd) for pidfd in watched])
    finally:
        await one.close()
    assert why.startswith(f"the SGLang server sglang-0 {how}:\n")
    assert '"GET /server_info HTTP/1.1" 200' in why  # one of the last lines of the log
    assert why.endswith(f"({tmp_path / 'sglang-0.log'})")
    assert [entry["event"] for entry in log_entries] == ["server.started", "server.died"]


async def test_a_server_that_ignores_sigterm_is_killed_without_files(tmp_path: Path, port: int, log_entries: list[Any]):
    one = make_server(tmp_path, port)
    await one.start()
    watched = [os.pidfd_open(pid) for pid in one.list_processes()]
    (tmp_path / "scratch" / "socket").touch()
    await one.close()
    await one.close()
    for pidfd in watched:
        wait_for_end(pidfd)
    assert one.death.cancelled()
    assert [entry["event"] for entry in log_entries] == ["server.started", "server.killed"]
    assert not (tmp_path / "scratch").exists()


async def test_an_incompatible_server_is_stopped(tmp_path: Path, port: int):
    given = make_requirements("/models/two", python=write_fake_interpreter(tmp_path), port=port)
    one = SGLangServer(given, log=tmp_path / "sglang-0.log", scratch=tmp_path / "scratch")
    with pytest.raises(
        ValueError, match=r"^model.checkpoint = /models/two: the SGLang server sglang-0 has a different"
    ):
        await one.start()
    assert one.list_processes() == {}
    with socket.create_server(("127.0.0.1", port)):  # the port is free again
        pass
