"""A call's memory cgroup counts memory that the sizes of its processes do not show. The tests count outcomes."""

import asyncio
from pathlib import Path

import pytest

from asterism.bus.messages import CodeCrashed, CodeOk, CodeOutOfMemory
from asterism.sandbox.hosts import local_host
from asterism.sandbox.isolation import format_isolation
from tests.sandbox.conftest import Client, StartSandbox, list_call_cgroups

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]
MIB = 1 << 20
LIMIT_MIB = 128
LIMITS = {"memory_mib": LIMIT_MIB, "time_limit_s": 20.0}
FILES = "for number in range(25): open(str(number), 'wb').write(bytes(8 << 20))"
TWO_CHILDREN = """
import os
for _ in range(2):
    if not os.fork():
        block = b"x" * (100 << 20)
        os.read(os.pipe()[0], 1)
os.wait()
print("done")
os._exit(0)
"""
INNOCENT = """
import time
block = b"x" * (47 << 20)
while time.process_time() < 0.25:
    pass
print(len(block))
"""


def read_peak(cgroup: Path) -> int:
    names = ("memory.max_usage_in_bytes", "memory.peak")
    return next(int((cgroup / name).read_text()) for name in names if (cgroup / name).exists())


def require_cgroups(client: Client) -> None:
    if not client.isolation.call_cgroups:
        pytest.skip("this machine does not allow cgroups for calls")


async def test_hidden_memory_of_a_call_stays_within_its_cgroup_and_harms_no_other_call(
    start_sandbox: StartSandbox,
) -> None:
    async with start_sandbox(file_mib=256, **LIMITS) as client:
        require_cgroups(client)
        assert format_isolation(client.isolation).endswith("; memory: a cgroup per call")
        assert await client.printed("kept = 7", 1) == ""
        cells = [client.cell(FILES, number) for number in (1, 2)]
        programs = [client.program(FILES), *[client.program(INNOCENT) for _ in range(4)]]
        *hoards, a, b, c, d = [result.outcome for result in await asyncio.gather(*cells, *programs)]
        assert [outcome for outcome in hoards if not isinstance(outcome, CodeOutOfMemory)] == []
        assert [isinstance(outcome, CodeOk) and outcome.output.stdout for outcome in (a, b, c, d)] == ["49283072\n"] * 4
        assert await client.printed("kept", 1) == "7\n"
        cgroups = list_call_cgroups(client.sandbox.server_pids)
        peaks_mib = [read_peak(cgroup) / MIB for cgroup in cgroups]
        assert LIMIT_MIB < max(peaks_mib) <= LIMIT_MIB * 1.25
    assert [path for path in {cgroup.parent.parent for cgroup in cgroups} if path.exists()] == []


async def test_a_call_is_out_of_memory_if_only_a_child_was_killed(client: Client) -> None:
    require_cgroups(client)
    outcome = (await client.program(TWO_CHILDREN)).outcome
    assert isinstance(outcome, CodeOutOfMemory)


async def test_a_notebook_can_rewrite_a_state_as_large_as_its_limit_without_a_checkpoint(client: Client) -> None:
    require_cgroups(client)
    await rewrite_large_state(client)
    peaks_mib = [read_peak(cgroup) / MIB for cgroup in list_call_cgroups(client.sandbox.server_pids)]
    assert 100 < max(peaks_mib) <= LIMIT_MIB * 1.25


async def rewrite_large_state(client: Client) -> None:
    assert await client.printed("state = bytearray(100 << 20)") == ""
    for number in range(3):
        rewrite = "for start in range(0, len(state), 4096):\n    state[start] += 1\nprint(state[-4096])"
        assert await client.printed(rewrite) == f"{number + 1}\n"
    outcome = (await client.cell("import os; state[-4096] = 9; os._exit(7)")).outcome
    assert isinstance(outcome, CodeCrashed)
    assert await client.printed("state[-4096]") == "3\n"


@pytest.mark.parametrize("start_sandbox", ["process"], indirect=True)
async def test_without_permission_for_cgroups_the_fork_servers_measure_memory(
    start_sandbox: StartSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(local_host, "CgroupFolder", refuse)
    async with start_sandbox(**LIMITS) as client:
        assert not client.isolation.call_cgroups
        assert format_isolation(client.isolation).endswith("; memory: measured, no cgroups")
        outcome = (await client.program(TWO_CHILDREN)).outcome
        assert isinstance(outcome, CodeOutOfMemory)
        await rewrite_large_state(client)
