"""Tests of calls and leftovers after a failure of a container, its init process or the executor."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from asterism.bus.messages import CodeOk, CodeRequested, Output
from asterism.bus.process.scratch_lock import holding_scratch, name_owner
from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.sandbox.contract import CodeResult, SandboxFailure
from asterism.sandbox.fork_server_sandbox import ForkServerSandbox
from asterism.sandbox.hosts.docker import docker_host
from asterism.sandbox.hosts.docker.docker_api import DockerEngine
from asterism.sandbox.hosts.docker.docker_host import ContainerHost
from asterism.sandbox.hosts.docker.docker_probe import get_engine_address
from tests.processes import wait_for_end

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.real_clock]


@asynccontextmanager
async def run_containers(**settings: Any) -> AsyncGenerator[tuple[ForkServerSandbox, ContainerHost]]:
    """Run a sandbox on fresh containers; none may be left at the end."""
    config = SandboxConfig(backend="docker", **settings)
    host = ContainerHost(config, run="test")
    sandbox = ForkServerSandbox(host, config, seed=7)
    await sandbox.start()
    folder, owner = host.gate.folder, host.gate.owner
    try:
        async with asyncio.timeout(120):
            yield sandbox, host
    finally:
        await sandbox.close()
    assert await list_containers(owner) == []
    assert not folder.parent.exists()


async def list_containers(owner: str) -> list[str]:
    engine = DockerEngine(get_engine_address(os.environ))
    try:
        return [container.id for container in await engine.list_owned() if container.owner == owner]
    finally:
        await engine.close()


def make_program(code: str, trajectory: int, call: int = 0) -> CodeRequested:
    return CodeRequested(trajectory, call, "python_code_with_standard_io", code, "")


async def run_all(sandbox: ForkServerSandbox, calls: list[CodeRequested]) -> list[CodeResult | SandboxFailure]:
    results = await asyncio.gather(*[sandbox.run(call) for call in calls], return_exceptions=True)
    assert all(isinstance(result, CodeResult | SandboxFailure) for result in results), results
    return results  # pyright: ignore[reportReturnType]


async def wait_for_answer(sandbox: ForkServerSandbox) -> CodeResult:
    """Return the first result of a recovering sandbox; infrastructure failures may precede it."""
    while True:
        with contextlib.suppress(SandboxFailure):
            return await sandbox.run(make_program("print(6 * 7)", 99))


def run_docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def stop_container(failure: str, container_id: str) -> None:
    """Kill or pause a container. The freezer of cgroup v1 can fail while processes fork: then retry."""
    for attempts_left in reversed(range(20)):
        try:
            run_docker(failure, container_id)
            return
        except subprocess.CalledProcessError as error:
            if "unable to freeze" not in error.stderr or not attempts_left:
                raise


@pytest.mark.parametrize("failure", ["kill", "pause"])
async def test_a_killed_or_frozen_container_causes_infrastructure_failures_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    async with run_containers(time_limit_s=500.0) as (sandbox, host):
        (before,) = host.live_containers
        calls = [make_program("import time; time.sleep(600)", number) for number in range(5)]
        calls += [make_program("import time; time.sleep(0.2); print(1)", number) for number in range(5, 305)]
        in_flight = asyncio.create_task(run_all(sandbox, calls))
        await sandbox.run(make_program("print(1)", 1000))
        stop_container(failure, before.id)
        monkeypatch.setattr(docker_host, "_HEARTBEAT_TIMEOUT_S", 2.0)  # not earlier: a busy machine may delay an answer
        results = await in_flight
        assert len(results) == 305
        assert all(isinstance(result, SandboxFailure) for result in results[:5])  # calls in flight at the failure
        assert {result.outcome for result in results if isinstance(result, CodeResult)} <= {CodeOk(Output("1\n"))}
        assert (await wait_for_answer(sandbox)).outcome == CodeOk(Output("42\n"))
        (after,) = host.live_containers
        assert after.id != before.id


async def test_a_notebook_is_rebuilt_after_its_container_was_killed() -> None:
    async with run_containers() as (sandbox, host):
        await sandbox.run(CodeRequested(1, 0, "jupyter_code", "import random\nx = random.random()\nprint(x)", ""))
        first = await sandbox.run(CodeRequested(1, 1, "jupyter_code", "x", ""))
        run_docker("kill", host.live_containers[0].id)
        await wait_for_answer(sandbox)
        again = await sandbox.run(CodeRequested(1, 2, "jupyter_code", "x", ""))
        assert again.outcome == first.outcome


async def test_one_of_two_containers_continues_when_the_other_is_killed() -> None:
    async with run_containers(containers=2, fork_servers=2) as (sandbox, host):
        assert len({container.pid for container in host.live_containers}) == 2
        os.kill(host.live_containers[0].pid, signal.SIGKILL)
        results = await run_all(sandbox, [make_program("print(1)", number) for number in range(50)])
        assert sum(isinstance(result, CodeResult) for result in results) >= 25


async def test_closing_repeats_the_removal_that_it_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    remove, started, removed = DockerEngine.remove, asyncio.Event(), list[str]()

    async def remove_late(engine: DockerEngine, container_id: str) -> None:
        removed.append(container_id)
        if len(removed) == 1:
            started.set()
            await asyncio.Event().wait()
        await remove(engine, container_id)

    monkeypatch.setattr(DockerEngine, "remove", remove_late)
    async with run_containers(containers=2) as (_, host):
        lost = host.live_containers[0]
        os.kill(lost.pid, signal.SIGKILL)
        await started.wait()
    assert removed.count(lost.id) == 2


async def test_a_container_out_of_memory_kills_only_its_largest_calls() -> None:
    hog = "import time\nblocks = []\nfor _ in range(450):\n    blocks.append(bytearray(b'x' * (1 << 20)))\ntime.sleep(1)\nprint('held')"

    async with run_containers(memory_mib=512, container_memory_mib=1024, time_limit_s=20.0) as (sandbox, host):
        await sandbox.run(CodeRequested(500, 0, "jupyter_code", "value = 41", ""))
        hogs = asyncio.create_task(run_all(sandbox, [make_program(hog, number) for number in range(4)]))
        small = await run_all(sandbox, [make_program("print(2)", 10 + number) for number in range(50)])
        assert [result.outcome for result in small if isinstance(result, CodeResult)] == [CodeOk(Output("2\n"))] * 50
        results = await hogs
        # Each call is below its own limit: calls that the kernel kills are retried and have no outcome.
        assert {type(result.outcome) for result in results if isinstance(result, CodeResult)} <= {CodeOk}
        after = await sandbox.run(CodeRequested(500, 1, "jupyter_code", "value + 1", ""))
        assert after.outcome == CodeOk(Output("42\n"))
        assert len(host.live_containers) == 1


_EXECUTOR = """
import asyncio, sys
from asterism.bus.messages import CodeRequested
from asterism.configs.schema.machines import SandboxConfig
from asterism.sandbox.hosts.docker.docker_host import ContainerHost
from asterism.sandbox.fork_server_sandbox import ForkServerSandbox

async def main():
    config = SandboxConfig(backend="docker", time_limit_s=100.0)
    host = ContainerHost(config, "test")
    sandbox = ForkServerSandbox(host, config)
    await sandbox.start()
    calls = [CodeRequested(n, 0, "python_code_with_standard_io", "while True: pass", "") for n in range(20)]
    tasks = [asyncio.create_task(sandbox.run(call)) for call in calls]
    await sandbox.run(CodeRequested(99, 0, "python_code_with_standard_io", "print(1)", ""))
    print("here", host.live_containers[0].id, host.gate.folder, *sandbox.server_pids, flush=True)
    await asyncio.gather(*tasks)

asyncio.run(main())
"""


def kill_an_executor() -> tuple[str, str]:
    """Kill an executor, wait for the end of its processes, and return its container and its folder."""
    with subprocess.Popen([sys.executable, "-c", _EXECUTOR], stdout=subprocess.PIPE, text=True) as executor:
        assert executor.stdout is not None
        container_id, folder, *pids = _read_report(executor.stdout)
        pidfds = [os.pidfd_open(int(pid)) for pid in pids]
        executor.kill()
    for pidfd in pidfds:
        wait_for_end(pidfd)
    return container_id, folder


async def test_a_killed_executor_leaves_no_process_and_the_next_one_removes_its_folder_and_container() -> None:
    container_id, folder = kill_an_executor()
    async with run_containers():
        assert not os.path.exists(folder)  # noqa: ASYNC240, PTH110
        assert container_id not in run_docker("ps", "--all", "--quiet", "--no-trunc").split()


async def test_only_containers_of_ended_owners_are_removed(tmp_path: Path) -> None:
    image = run_docker("images", "--filter", "reference=asterism-sandbox", "--quiet").split()[0]

    def create(owner: str) -> str:
        return run_docker("create", "--network", "none", "--label", f"asterism.owner={owner}", image).strip()

    with holding_scratch(tmp_path / "held") as held:
        dead, living = create(name_owner(tmp_path / "gone")), create(name_owner(held))
        foreign = create("another-machine:1:2:/tmp/gone")
        try:
            async with run_containers():
                containers = run_docker("ps", "--all", "--quiet", "--no-trunc").split()
                assert dead not in containers
                assert {living, foreign} <= set(containers)
        finally:
            run_docker("rm", "--force", living, foreign)


async def test_the_container_has_no_privileges_and_no_network() -> None:
    async with run_containers() as (_, host):
        (container,) = json.loads(run_docker("inspect", host.live_containers[0].id))
        setup = container["HostConfig"]
        assert container["Config"]["User"] == "65534:65534"
        assert setup["NetworkMode"] == "none"
        assert setup["ReadonlyRootfs"]
        assert setup["CapDrop"] == ["ALL"]
        assert not setup["CapAdd"]
        assert not setup["Privileged"]
        assert setup["Memory"] == setup["MemorySwap"] == 8192 << 20
        assert setup["PidsLimit"] == 16_384
        assert any(option.startswith("seccomp={") for option in setup["SecurityOpt"])
        assert "no-new-privileges:true" in setup["SecurityOpt"]
        assert [mount["RW"] for mount in container["Mounts"]] == [False]
        fields = _read_status(host.live_containers[0].pid)
        assert fields["CapBnd"] == fields["CapEff"] == fields["CapPrm"] == "0" * 16
        assert fields["NoNewPrivs"] == "1"
        assert fields["Seccomp"] == "2"


def _read_report(stdout: IO[str]) -> list[str]:
    """Return the words of the line that begins with "here"; log lines precede it."""
    for line in stdout:
        if line.startswith("here "):
            return line.split()[1:]
    raise AssertionError("the executor printed no report")


def _read_status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)
