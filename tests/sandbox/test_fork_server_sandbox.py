"""After crashes of the sandbox's own processes, each call ends once, and no process is left."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from asterism.bus.messages import CodeOk, CodeRaised, CodeTimedOut, Output
from asterism.bus.process.scratch_lock import remove_stale_scratch
from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.sandbox.contract import CodeResult, SandboxFailure
from tests.processes import family, is_running
from tests.sandbox.conftest import Client, StartSandbox, nightly_in_containers, open_sandbox
from tests.sandbox.executors import kill_an_executor

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]
LIMITS = {"grade_limit_s": 0.3, "concurrent_gradings": 4}


async def test_calls_fail_once_when_their_fork_server_exits_and_the_next_call_runs(start_sandbox: StartSandbox) -> None:
    async with start_sandbox(time_limit_s=500) as client:
        await client.printed("x = 5", trajectory=3)
        calls = [asyncio.create_task(client.program("import time; time.sleep(600)")) for _ in range(20)]
        assert isinstance((await client.program("print(1)")).outcome, CodeOk)  # the earlier calls are sent by then
        before = family(*client.sandbox.server_pids)
        os.kill(_find_fork_server(client), signal.SIGKILL)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, SandboxFailure)
            assert str(result) == "fork server died"
        assert (await client.program("print(2)")).outcome == CodeOk(Output("2\n"))
        assert await client.printed("x", trajectory=3) == "5\n"
        assert [pid for pid in before if is_running(pid)] == []


@nightly_in_containers
async def test_every_fork_server_that_exits_is_replaced_by_one_server(start_sandbox: StartSandbox) -> None:
    async with start_sandbox(fork_servers=1) as client:
        for _ in range(3):
            os.kill(_find_fork_server(client), signal.SIGKILL)
            # This program can still reach the killed server.
            await asyncio.gather(client.program("print(1)"), return_exceptions=True)
            assert (await client.program("print(2)")).outcome == CodeOk(Output("2\n"))
            assert len(client.sandbox.server_pids) == 1


@nightly_in_containers
async def test_an_unreadable_ground_truth_is_an_infrastructure_failure(client: Client) -> None:
    with pytest.raises(SandboxFailure, match="ground truth cannot be read"):
        await client.grade("x+1", "")
    assert not (await client.grade("not a formula at all (", "x+1")).correct
    assert (await client.grade("x+1", "1+x")).correct


@nightly_in_containers
async def test_queued_calls_run_after_the_exit_of_the_fork_server(client: Client) -> None:
    calls = [asyncio.create_task(client.program("import time; time.sleep(0.3)")) for _ in range(200)]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    os.kill(_find_fork_server(client), signal.SIGKILL)
    results = await asyncio.gather(*calls, return_exceptions=True)
    answered = [result for result in results if isinstance(result, CodeResult)]
    failed = [result for result in results if isinstance(result, SandboxFailure)]
    assert len(answered) + len(failed) == 200
    assert len(failed) <= 128
    assert (await client.program("print(2)")).outcome == CodeOk(Output("2\n"))
    assert {type(result.outcome) for result in answered} == {CodeOk}


@nightly_in_containers
async def test_a_comparison_beyond_its_limits_is_wrong_and_delays_no_other_comparison(client: Client) -> None:
    bombs = ["(x+1)^{99999}+(x+2)^{99999}", "(x+y+z+w)^{900}", "(x+1)^{-3000}+(x+2)^{-3000}", "+".join(["x^{2}"] * 400)]
    exploding = [asyncio.create_task(client.grade(bomb, "y+1")) for bomb in bombs]
    assert (await client.grade("x+1", "1+x")).correct
    assert not exploding[0].done()
    assert [(await task).correct for task in exploding] == [False] * len(bombs)
    with pytest.raises(SandboxFailure, match="ground truth exceeds the grader's limits"):
        await client.grade("y", "{" * 1000 + "x" + "}" * 1000)


@nightly_in_containers
async def test_gradings_succeed_after_a_grader_hangs_or_is_killed(client: Client) -> None:
    assert (await client.grade("x+1", "1+x")).correct
    for number in (signal.SIGSTOP, signal.SIGKILL):
        os.kill(family(client.sandbox.server_pids[-1])[-2], number)  # the last pid is the grader's worker
        assert (await client.grade("a+b", "b+a")).correct


def test_no_process_of_the_sandbox_outlives_its_executor_and_the_next_start_removes_its_cgroups() -> None:
    """The executor has open notebooks, an endless loop, and code that reset its parent-death signal."""
    hostile = "import os, ctypes\nctypes.CDLL(None).prctl(1, 0)\nif os.fork(): os.setsid\nwhile True: pass"
    left = kill_an_executor(["x = 1"] * 5, ["while True: pass", hostile], backend="process", time_limit_s=500)
    assert len(left.processes) >= 1 + 1 + 5 + 3  # the namespace's parent, the fork server, 5 notebooks, 3 loops
    if not left.cgroups:
        pytest.skip("this machine does not allow cgroups for calls; the processes have been checked")
    assert [folder for folder in left.cgroups if not Path(folder).exists()] == []
    remove_stale_scratch()
    assert [folder for folder in left.cgroups if Path(folder).exists()] == []


_DAEMON = """
import os, time
if os.fork() == 0:
    if os.fork() == 0:  # its parent exits: the fork server becomes its parent
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(0.5)
"""


async def test_a_sandbox_runs_without_namespaces_and_reports_this(start_sandbox: StartSandbox) -> None:
    async with start_sandbox(namespaces="off", time_limit_s=1.0, fork_servers=1) as client:
        assert client.isolation.namespaces == ()
        assert any(sentence.startswith("No namespaces") for sentence in client.isolation.missing)
        assert (await client.program("open('f', 'w').write('x')\nprint(open('f').read())")).outcome == CodeOk(
            Output("x\n")
        )
        await client.program("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)")
        assert isinstance(
            (await client.program("import os\nwhile os.fork() >= 0: pass")).outcome, CodeRaised | CodeTimedOut
        )
        assert await client.printed("1+1") == "2\n"
        call = asyncio.create_task(client.program(_DAEMON))
        while not call.done():  # the ends of these programs do not kill the daemon's parent
            await client.program("print(1)")
        assert (await call).outcome == CodeOk(Output(""))


async def test_a_failed_start_reports_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asterism.sandbox.pool.fork_server_client._MODULE", "sandbox.no_such_module")
    with pytest.raises(SandboxFailure, match="exited while it started"):
        async with open_sandbox("process", namespaces="required"):
            pass


def _find_fork_server(client: Client) -> int:
    """Return the pid of the fork server, a child of the launched process."""
    return family(client.sandbox.server_pids[0])[1]
