"""Tests of calls and leftovers after a failure of a container, its init process or the executor."""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from asterism.bus.messages import CodeOk, Output
from asterism.bus.process.scratch_lock import holding_scratch, name_owner
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.sandbox.contract import CodeResult, SandboxFailure
from asterism.sandbox.hosts.docker import docker_host
from asterism.sandbox.hosts.docker.docker_api import DockerEngine
from asterism.sandbox.image.docker_cli import run_docker
from tests.sandbox.conftest import Client, wait_for_outcome
from tests.sandbox.executors import kill_an_executor
from tests.sandbox.hosts.docker.containers import run_containers

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.real_clock]


async def run_all(client: Client, codes: Sequence[str], first: int = 0) -> list[CodeResult | SandboxFailure]:
    """Run each program in a separate trajectory, and return the results and failures."""
    calls = [client.program(code, trajectory=first + number) for number, code in enumerate(codes)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, CodeResult | SandboxFailure) for result in results), results
    return results  # pyright: ignore[reportReturnType]


def stop_container(failure: str, container_id: str) -> None:
    """Kill or pause a container. Retry a pause: the freezer of cgroup v1 can fail while processes fork."""
    for attempts_left in reversed(range(20)):
        try:
            run_docker(failure, container_id)
            return
        except UnusableInput as error:
            if "unable to freeze" not in str(error) or not attempts_left:
                raise


@pytest.mark.parametrize("failure", ["kill", "pause"])
async def test_a_killed_or_frozen_container_causes_failures_and_is_replaced_with_its_notebooks(
    monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    async with run_containers(time_limit_s=500.0) as (client, host):
        (before,) = host.live_containers
        drawn = await client.printed("import random\nx = random.random()\nx", 2000)
        codes = ["import time; time.sleep(600)"] * 5 + ["import time; time.sleep(0.2); print(1)"] * 150
        in_flight = asyncio.create_task(run_all(client, codes))
        await client.program("print(1)", trajectory=1000)
        stop_container(failure, before.id)
        monkeypatch.setattr(docker_host, "_HEARTBEAT_TIMEOUT_S", 2.0)  # a busy machine can delay earlier answers
        results = await in_flight
        assert len(results) == 155
        assert all(isinstance(result, SandboxFailure) for result in results[:5])  # calls in flight at the failure
        assert {result.outcome for result in results if isinstance(result, CodeResult)} <= {CodeOk(Output("1\n"))}
        assert await wait_for_outcome(client) == CodeOk(Output("42\n"))
        (after,) = host.live_containers
        assert after.id != before.id
        assert await client.printed("x", 2000) == drawn


async def test_one_of_two_containers_continues_when_the_other_is_killed() -> None:
    async with run_containers(containers=2, fork_servers=2) as (client, host):
        assert len({container.pid for container in host.live_containers}) == 2
        os.kill(host.live_containers[0].pid, signal.SIGKILL)
        results = await run_all(client, ["print(1)"] * 50)
        assert sum(isinstance(result, CodeResult) for result in results) >= 25


async def test_closing_the_host_cancels_a_removal_in_flight_and_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    remove, started, removed = DockerEngine.remove, asyncio.Event(), list[str]()

    async def remove_late(engine: DockerEngine, container_id: str) -> None:
        removed.append(container_id)
        if len(removed) == 1:
            started.set()
            await asyncio.Event().wait()
        await remove(engine, container_id)

    monkeypatch.setattr(DockerEngine, "remove", remove_late)
    async with run_containers(containers=2, fork_servers=2) as (_, host):
        lost = host.live_containers[0]
        os.kill(lost.pid, signal.SIGKILL)
        await started.wait()
    assert removed.count(lost.id) == 2


async def test_only_the_largest_calls_of_a_container_out_of_memory_are_killed() -> None:
    hog = "import time\nblocks = []\nfor _ in range(450):\n    blocks.append(bytearray(b'x' * (1 << 20)))\ntime.sleep(1)\nprint('held')"

    async with run_containers(memory_mib=512, container_memory_mib=1024, time_limit_s=20.0) as (client, host):
        assert await client.printed("value = 41", 500) == ""
        hogs = asyncio.create_task(run_all(client, [hog] * 4))
        small = await run_all(client, ["print(2)"] * 50, first=10)
        assert [result.outcome for result in small if isinstance(result, CodeResult)] == [CodeOk(Output("2\n"))] * 50
        results = await hogs
        # Each call is below its own limit, so a call that the kernel kills is retried.
        assert {type(result.outcome) for result in results if isinstance(result, CodeResult)} <= {CodeOk}
        assert await client.printed("value + 1", 500) == "42\n"
        assert len(host.live_containers) == 1


async def test_a_killed_executor_leaves_no_process_and_the_next_one_removes_its_folder_and_container() -> None:
    left = kill_an_executor([], ["while True: pass"] * 20, backend="docker", time_limit_s=100.0)
    (container_id,) = left.containers
    async with run_containers():
        assert not os.path.exists(left.folder)  # noqa: ASYNC240, PTH110
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


def _read_status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)
