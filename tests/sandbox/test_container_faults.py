"""What becomes of calls, and of what lies about, when a container, its keeper, or the engine fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, Any

import pytest

from bus.messages import CodeOk, CodeOutOfMemory, CodeRequested, Output
from configs.schema import Sandbox as SandboxConfig
from sandbox import docker_backend
from sandbox.backend import ForkServerSandbox
from sandbox.contract import CodeResult, SandboxFailure
from sandbox.docker_backend import ContainerHost
from sandbox.docker_engine import DockerEngine
from sandbox.docker_probe import engine_address
from sandbox.owner import is_gone, owner_mark
from tests.processes import wait_for_end

pytestmark = [pytest.mark.docker, pytest.mark.slow]

Scenario = Callable[[ForkServerSandbox, ContainerHost], Awaitable[None]]


def play(scenario: Scenario, **settings: Any) -> None:
    """Runs the scenario on fresh containers, and then finds none of them left."""

    async def whole() -> None:
        config = SandboxConfig(backend="docker", **settings)
        host = ContainerHost(config, run="test")
        sandbox = ForkServerSandbox(host, config, seed=7)
        await sandbox.start()
        folder = host.socket_folder
        try:
            await asyncio.wait_for(scenario(sandbox, host), 120)
        finally:
            await sandbox.close()
        assert await containers_of(owner_mark()) == []
        assert not folder.exists()

    asyncio.run(whole())


async def containers_of(owner: str) -> list[str]:
    engine = DockerEngine(engine_address(os.environ))
    try:
        return [container.id for container in await engine.owned() if container.owner == owner]
    finally:
        await engine.close()


def program(code: str, trajectory: int, call: int = 0) -> CodeRequested:
    return CodeRequested(trajectory, call, "python_code_with_standard_io", code, "")


async def ends_of(sandbox: ForkServerSandbox, calls: list[CodeRequested]) -> list[CodeResult | SandboxFailure]:
    """Each call's one end."""
    ends = await asyncio.gather(*[sandbox.run(call) for call in calls], return_exceptions=True)
    assert all(isinstance(end, CodeResult | SandboxFailure) for end in ends), ends
    return ends  # pyright: ignore[reportReturnType]


async def first_answer(sandbox: ForkServerSandbox) -> CodeResult:
    """Of a sandbox that is healing: infrastructure may fail before, an outcome is right."""
    while True:
        with contextlib.suppress(SandboxFailure):
            return await sandbox.run(program("print(6 * 7)", 99))


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_killed_container_costs_infrastructure_failures_and_is_replaced() -> None:
    async def scenario(sandbox: ForkServerSandbox, host: ContainerHost) -> None:
        (before,) = host.containers
        calls = [program("import time; time.sleep(0.2); print(1)", number) for number in range(300)]
        under_way = asyncio.create_task(ends_of(sandbox, calls))
        await sandbox.run(program("print(1)", 1000))
        docker("kill", before.id)
        ends = await under_way
        assert len(ends) == 300
        assert any(isinstance(end, SandboxFailure) for end in ends)
        assert {end.outcome for end in ends if isinstance(end, CodeResult)} <= {CodeOk(Output("1\n"))}
        assert (await first_answer(sandbox)).outcome == CodeOk(Output("42\n"))
        (after,) = host.containers
        assert after.id != before.id

    play(scenario)


def test_a_notebook_lives_on_when_its_container_was_killed() -> None:
    async def scenario(sandbox: ForkServerSandbox, host: ContainerHost) -> None:
        await sandbox.run(CodeRequested(1, 0, "jupyter_code", "import random\nx = random.random()\nprint(x)", ""))
        first = await sandbox.run(CodeRequested(1, 1, "jupyter_code", "x", ""))
        docker("kill", host.containers[0].id)
        await first_answer(sandbox)
        again = await sandbox.run(CodeRequested(1, 2, "jupyter_code", "x", ""))
        assert again.outcome == first.outcome

    play(scenario)


def test_one_of_two_containers_goes_on_alone() -> None:
    async def scenario(sandbox: ForkServerSandbox, host: ContainerHost) -> None:
        assert len({container.pid for container in host.containers}) == 2
        os.kill(host.containers[0].pid, signal.SIGKILL)  # its keeper
        ends = await ends_of(sandbox, [program("print(1)", number) for number in range(50)])
        assert sum(isinstance(end, CodeResult) for end in ends) >= 25

    play(scenario, containers=2, fork_servers=2)


def test_a_container_out_of_memory_loses_its_largest_call_and_no_other() -> None:
    hog = "import time\nblocks = []\nfor _ in range(450):\n    blocks.append(bytearray(b'x' * (1 << 20)))\ntime.sleep(1)\nprint('held')"

    async def scenario(sandbox: ForkServerSandbox, host: ContainerHost) -> None:
        await sandbox.run(CodeRequested(500, 0, "jupyter_code", "kept = 41", ""))
        hogs = asyncio.create_task(ends_of(sandbox, [program(hog, number) for number in range(4)]))
        small = await ends_of(sandbox, [program("print(2)", 10 + number) for number in range(50)])
        assert [end.outcome for end in small if isinstance(end, CodeResult)] == [CodeOk(Output("2\n"))] * 50
        ends = await hogs
        kinds = [type(end.outcome) for end in ends if isinstance(end, CodeResult)]
        assert len(kinds) == 4
        assert CodeOutOfMemory in kinds
        assert set(kinds) <= {CodeOutOfMemory, CodeOk}
        kept = await sandbox.run(CodeRequested(500, 1, "jupyter_code", "kept + 1", ""))
        assert kept.outcome == CodeOk(Output("42\n"))
        assert len(host.containers) == 1

    play(scenario, memory_mib=512, container_memory_mib=1024, time_limit_s=20.0)


def test_a_killed_fork_server_in_a_container_is_replaced() -> None:
    async def scenario(sandbox: ForkServerSandbox, host: ContainerHost) -> None:
        await sandbox.run(CodeRequested(1, 0, "jupyter_code", "x = 41", ""))
        under_way = asyncio.create_task(ends_of(sandbox, [program("print(3)", number) for number in range(200)]))
        await sandbox.run(program("print(3)", 1000))
        os.kill(sandbox.server_pids[0], signal.SIGKILL)
        ends = await under_way
        assert {end.outcome for end in ends if isinstance(end, CodeResult)} <= {CodeOk(Output("3\n"))}
        assert (await first_answer(sandbox)).outcome == CodeOk(Output("42\n"))
        again = await sandbox.run(CodeRequested(1, 1, "jupyter_code", "x + 1", ""))
        assert again.outcome == CodeOk(Output("42\n"))

    play(scenario)


_EXECUTOR = """
import asyncio, sys
from bus.messages import CodeRequested
from configs.schema import Sandbox
from sandbox.docker_backend import ContainerHost
from sandbox import docker_backend
from sandbox.backend import ForkServerSandbox

async def main():
    config = Sandbox(backend="docker", time_limit_s=100.0)
    host = ContainerHost(config, "test")
    sandbox = ForkServerSandbox(host, config)
    await sandbox.start()
    calls = [CodeRequested(n, 0, "python_code_with_standard_io", "while True: pass", "") for n in range(20)]
    tasks = [asyncio.create_task(sandbox.run(call)) for call in calls]
    await sandbox.run(CodeRequested(99, 0, "python_code_with_standard_io", "print(1)", ""))
    print("here", host.containers[0].id, host.socket_folder, *sandbox.server_pids, flush=True)
    await asyncio.gather(*tasks)

asyncio.run(main())
"""


def test_nothing_outlives_an_executor_that_was_killed_and_the_next_one_sweeps_what_did() -> None:
    executor = subprocess.Popen([sys.executable, "-c", _EXECUTOR], stdout=subprocess.PIPE, text=True)
    assert executor.stdout is not None
    container_id, folder, *pids = _word_of(executor.stdout)
    endings = [os.pidfd_open(int(pid)) for pid in pids]
    executor.kill()
    executor.wait()
    executor.stdout.close()
    for ending in endings:
        wait_for_end(ending)

    async def scenario(sandbox: ForkServerSandbox, host: ContainerHost) -> None:
        assert not os.path.exists(folder)  # noqa: ASYNC240, PTH110
        assert container_id not in docker("ps", "--all", "--quiet", "--no-trunc").split()

    play(scenario)


def test_a_container_whose_owner_is_gone_is_removed_and_another_owners_is_not() -> None:
    image = docker("images", "--filter", "reference=asterism-sandbox", "--quiet").split()[0]
    machine, _, rest = owner_mark().partition("/")
    pid, _, started = rest.partition("/")
    run = ["create", "--network", "none", "--label"]
    dead = docker(*run, f"asterism.owner={machine}/{pid}/{int(started) - 1}", image).strip()
    living = docker(*run, f"asterism.owner={machine}/{os.getppid()}/{_started(os.getppid())}", image).strip()
    foreign = docker(*run, "asterism.owner=another-machine/1/1", image).strip()
    try:

        async def scenario(sandbox: ForkServerSandbox, host: ContainerHost) -> None:
            left = docker("ps", "--all", "--quiet", "--no-trunc").split()
            assert dead not in left
            assert {living, foreign} <= set(left)

        play(scenario)
    finally:
        docker("rm", "--force", living, foreign)


def test_a_mark_is_gone_when_its_process_is() -> None:
    assert not is_gone(owner_mark())
    machine = owner_mark().partition("/")[0]
    assert is_gone(f"{machine}/{2**22 + 1}/1")
    assert not is_gone("another-machine/1/1")


def test_the_container_is_locked_down() -> None:
    async def scenario(sandbox: ForkServerSandbox, host: ContainerHost) -> None:
        (container,) = json.loads(docker("inspect", host.containers[0].id))
        setup = container["HostConfig"]
        assert container["Config"]["User"] == "65534:65534"
        assert setup["NetworkMode"] == "none"
        assert setup["ReadonlyRootfs"]
        assert setup["CapDrop"] == ["ALL"]
        assert not setup["CapAdd"]
        assert not setup["Privileged"]
        assert setup["Memory"] == setup["MemorySwap"] == 8192 << 20
        assert setup["PidsLimit"] == 8192
        assert any(option.startswith("seccomp={") for option in setup["SecurityOpt"])
        assert "no-new-privileges:true" in setup["SecurityOpt"]
        assert [mount["RW"] for mount in container["Mounts"]] == [False]
        fields = _status(host.containers[0].pid)
        assert fields["CapBnd"] == fields["CapEff"] == fields["CapPrm"] == "0" * 16
        assert fields["NoNewPrivs"] == "1"
        assert fields["Seccomp"] == "2"

    play(scenario)


def _word_of(stdout: IO[str]) -> list[str]:
    """The line that begins with "here"; log lines come before it."""
    for line in stdout:
        if line.startswith("here "):
            return line.split()[1:]
    raise AssertionError("the executor said nothing")


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def _started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_a_container_that_is_frozen_is_replaced_and_its_calls_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_backend, "_SILENCE_S", 2.0)

    async def scenario(sandbox: ForkServerSandbox, host: ContainerHost) -> None:
        (before,) = host.containers
        under_way = asyncio.create_task(ends_of(sandbox, [program("print(1)", number) for number in range(200)]))
        await sandbox.run(program("print(1)", 1000))
        docker("pause", before.id)
        assert len(await under_way) == 200
        assert (await first_answer(sandbox)).outcome == CodeOk(Output("42\n"))
        (after,) = host.containers
        assert after.id != before.id

    play(scenario)
