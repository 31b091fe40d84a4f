"""A ready server's processes: the death of one kills all, and so does `close`.

Uses a fake server, which starts quickly; tests/sglang/test_server.py tests a real one.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from engine.sglang.server.managed_server import SGLangServer
from tests.engine.sglang.server.fake_interpreter import ROOT, write_interpreter
from tests.engine.sglang.server.requirements import make_info, make_requirements

pytestmark = pytest.mark.slow

WORKER = "sglang::scheduler"

ORPHAN = """
import asyncio, sys
from pathlib import Path
from engine.sglang.server.managed_server import SGLangServer
from tests.engine.sglang.server.requirements import make_requirements
async def main():
    folder = Path(sys.argv[1])
    given = make_requirements(python=str(folder / "python"), port=int(sys.argv[2]))
    server = SGLangServer(given, log=folder / "sglang-0.log", scratch=folder / "scratch")
    await server.start()
    print("ready", min(server.list_processes()), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
def port() -> int:
    """A port that is free now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def write_fake_interpreter(folder: Path) -> str:
    return write_interpreter(folder, msgspec.json.encode(make_info()))


def make_server(folder: Path, port: int, ready_s: float = 10.0) -> SGLangServer:
    given = make_requirements(python=write_fake_interpreter(folder), port=port, health_timeout_s=ready_s)
    return SGLangServer(given, log=folder / "sglang-0.log", scratch=folder / "scratch", probe_interval_s=0.05)


def wait_for_end(pidfd: int) -> None:
    select.select([pidfd], [], [])
    os.close(pidfd)


@pytest.mark.parametrize(
    ("victim", "how"), [(WORKER, f"lost its process {WORKER}"), ("python", "ended with exit code -9")]
)
def test_the_death_of_one_process_kills_the_others_and_is_named(tmp_path: Path, port: int, victim: str, how: str):
    async def scenario() -> str:
        one = make_server(tmp_path, port)
        try:
            assert await one.start() == f"http://127.0.0.1:{port}"
            processes = one.list_processes()
            assert sorted(name == WORKER for name in processes.values()) == [False, True]
            watched = [os.pidfd_open(pid) for pid in processes]
            os.kill(
                next(pid for pid, name in processes.items() if (name == WORKER) == (victim == WORKER)), signal.SIGKILL
            )
            why = await one.death
            await asyncio.to_thread(lambda: [wait_for_end(pidfd) for pidfd in watched])
            return why
        finally:
            await one.close()

    with capture_logs() as entries:
        why = asyncio.run(scenario())
    assert why.startswith(f"the SGLang server sglang-0 {how}:\n")
    assert '"GET /server_info HTTP/1.1" 200' in why  # from the log's last lines
    assert why.endswith(f"({tmp_path / 'sglang-0.log'})")
    assert [entry["event"] for entry in entries] == ["server.started", "server.died"]


def test_a_stopped_server_is_killed_with_all_of_its_processes(tmp_path: Path, port: int):
    async def scenario() -> str:
        one = make_server(tmp_path, port, ready_s=0.2)
        try:
            await one.start()
            watched = [os.pidfd_open(pid) for pid in one.list_processes()]
            os.killpg(min(one.list_processes()), signal.SIGSTOP)
            why = await one.death
            await asyncio.to_thread(lambda: [wait_for_end(pidfd) for pidfd in watched])
            return why
        finally:
            await one.close()

    with capture_logs() as entries:
        assert asyncio.run(scenario()).startswith("the SGLang server sglang-0 no longer responds:\n")
    assert [entry["event"] for entry in entries] == ["server.started", "server.died"]


def test_a_server_that_ignores_sigterm_is_killed_and_leaves_no_files(tmp_path: Path, port: int):
    async def scenario() -> bool:
        one = make_server(tmp_path, port)
        await one.start()
        watched = [os.pidfd_open(pid) for pid in one.list_processes()]
        (tmp_path / "scratch" / "socket").touch()
        await one.close()
        await one.close()
        for pidfd in watched:
            wait_for_end(pidfd)
        return one.death.cancelled()

    with capture_logs() as entries:
        assert asyncio.run(scenario())
    assert [entry["event"] for entry in entries] == ["server.started", "server.killed"]
    assert not (tmp_path / "scratch").exists()


def test_an_incompatible_server_is_stopped(tmp_path: Path, port: int):
    async def scenario() -> None:
        given = make_requirements("/models/two", python=write_fake_interpreter(tmp_path), port=port)
        one = SGLangServer(given, log=tmp_path / "sglang-0.log", scratch=tmp_path / "scratch")
        with pytest.raises(
            ValueError, match=r"^model.checkpoint = /models/two: the SGLang server sglang-0 has a different"
        ):
            await one.start()
        assert one.list_processes() == {}

    asyncio.run(scenario())
    with socket.create_server(("127.0.0.1", port)):  # the port is free
        pass


def test_a_server_dies_with_the_process_that_started_it(tmp_path: Path, port: int):
    write_fake_interpreter(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ORPHAN, str(tmp_path), str(port)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = next(line for line in parent.stdout if line.startswith("ready")).split()[1]
        watched = os.pidfd_open(int(pid))
        group = os.getpgid(int(pid))
        parent.kill()
    wait_for_end(watched)
    os.killpg(group, signal.SIGKILL)  # the fake worker does not die with its server, unlike SGLang's
