"""A server's life once it is ready: whoever of its processes dies, all do, and it is told why; so they do when it is closed.

The server is a stand-in that is quickly there; tests/sglang/test_server.py has the same of a real one.
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

from engine.sglang.server import SGLangServer
from tests.engine.sglang.pretender import ROOT, write_interpreter
from tests.engine.sglang.servers import info, wanted

pytestmark = pytest.mark.slow

WORKER = "sglang::scheduler"

ORPHAN = """
import asyncio, sys
from pathlib import Path
from engine.sglang.server import SGLangServer
from tests.engine.sglang.servers import wanted
async def main():
    folder = Path(sys.argv[1])
    given = wanted(python=str(folder / "python"), port=int(sys.argv[2]))
    server = SGLangServer(given, log=folder / "sglang-0.log", scratch=folder / "scratch")
    await server.start()
    print("ready", min(server.processes()), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
def port() -> int:
    """Free as it is asked for."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def interpreter(folder: Path) -> str:
    return write_interpreter(folder, msgspec.json.encode(info()))


def server(folder: Path, port: int, ready_s: float = 10.0) -> SGLangServer:
    given = wanted(python=interpreter(folder), port=port, ready_s=ready_s)
    return SGLangServer(given, log=folder / "sglang-0.log", scratch=folder / "scratch", ask_every_s=0.05)


def wait_for_end(pidfd: int) -> None:
    select.select([pidfd], [], [])
    os.close(pidfd)


@pytest.mark.parametrize(
    ("victim", "how"), [(WORKER, f"lost its process {WORKER}"), ("python", "ended with exit code -9")]
)
def test_when_one_of_its_processes_dies_all_do_and_it_is_said_which(tmp_path: Path, port: int, victim: str, how: str):
    async def scenario() -> str:
        one = server(tmp_path, port)
        try:
            assert await one.start() == f"http://127.0.0.1:{port}"
            processes = one.processes()
            assert sorted(name == WORKER for name in processes.values()) == [False, True]
            watched = [os.pidfd_open(pid) for pid in processes]
            os.kill(
                next(pid for pid, name in processes.items() if (name == WORKER) == (victim == WORKER)), signal.SIGKILL
            )
            why = await one.died
            await asyncio.to_thread(lambda: [wait_for_end(pidfd) for pidfd in watched])
            return why
        finally:
            await one.close()

    with capture_logs() as said:
        why = asyncio.run(scenario())
    assert why.startswith(f"the SGLang server sglang-0 {how}:\n")
    assert '"GET /server_info HTTP/1.1" 200' in why  # what it printed last
    assert why.endswith(f"({tmp_path / 'sglang-0.log'})")
    assert [entry["event"] for entry in said] == ["server.started", "server.died"]


def test_one_that_is_stopped_is_ended_with_all_of_its_processes(tmp_path: Path, port: int):
    async def scenario() -> str:
        one = server(tmp_path, port, ready_s=0.2)
        try:
            await one.start()
            watched = [os.pidfd_open(pid) for pid in one.processes()]
            os.killpg(min(one.processes()), signal.SIGSTOP)
            why = await one.died
            await asyncio.to_thread(lambda: [wait_for_end(pidfd) for pidfd in watched])
            return why
        finally:
            await one.close()

    with capture_logs() as said:
        assert asyncio.run(scenario()).startswith("the SGLang server sglang-0 does not answer any more:\n")
    assert [entry["event"] for entry in said] == ["server.started", "server.died"]


def test_one_that_ignores_sigterm_is_killed_and_leaves_nothing(tmp_path: Path, port: int):
    async def scenario() -> bool:
        one = server(tmp_path, port)
        await one.start()
        watched = [os.pidfd_open(pid) for pid in one.processes()]
        (tmp_path / "scratch" / "socket").touch()
        await one.close()
        await one.close()
        for pidfd in watched:
            wait_for_end(pidfd)
        return one.died.cancelled()

    with capture_logs() as said:
        assert asyncio.run(scenario())
    assert [entry["event"] for entry in said] == ["server.started", "server.killed"]
    assert not (tmp_path / "scratch").exists()


def test_a_server_that_does_not_fit_is_ended(tmp_path: Path, port: int):
    async def scenario() -> None:
        given = wanted("/models/two", python=interpreter(tmp_path), port=port)
        one = SGLangServer(given, log=tmp_path / "sglang-0.log", scratch=tmp_path / "scratch")
        with pytest.raises(
            ValueError, match=r"^model.checkpoint = /models/two: the SGLang server sglang-0 has another"
        ):
            await one.start()
        assert one.processes() == {}

    asyncio.run(scenario())
    with socket.create_server(("127.0.0.1", port)):  # nobody listens there
        pass


def test_it_dies_with_the_process_that_started_it(tmp_path: Path, port: int):
    interpreter(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ORPHAN, str(tmp_path), str(port)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = next(line for line in parent.stdout if line.startswith("ready")).split()[1]
        watched = os.pidfd_open(int(pid))
        group = os.getpgid(int(pid))
        parent.kill()
    wait_for_end(watched)
    os.killpg(group, signal.SIGKILL)  # the stand-in's worker, which does not die with it as SGLang's does
