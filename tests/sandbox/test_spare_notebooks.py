"""Notebooks that a fork server forks ahead of their first cells."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from bus.messages import CodeOk
from configs.schema import SandboxConfig as SandboxConfig
from tests.processes import family
from tests.sandbox.conftest import Client, StartSandbox

pytestmark = [pytest.mark.real_clock, pytest.mark.slow]
_SPARE = 3
_WARM_PROCESSES = 4  # forked before the spare notebooks


def list_spare_processes(client: Client) -> list[int]:
    """The first processes of notebooks without cells: the children of the fork server that have a child."""
    children = {pid: list_children(pid) for pid in family(*client.sandbox.server_pids)}
    calls = max(children.values(), key=len)
    if len(calls) <= _WARM_PROCESSES:  # the server is starting
        return []
    return [pid for pid in calls if len(children.get(pid, ())) == 1]


def list_children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return []


async def find_spare_processes(client: Client, count: int, replaced: Sequence[int] = ()) -> list[int]:
    """Waits for `count` that are not `replaced`; a call between two looks needs the fork server. Raises TimeoutError."""
    async with asyncio.timeout(30):
        while len(spare := list_spare_processes(client)) != count or not {*spare}.isdisjoint(replaced):
            await client.program("pass")
    return spare


async def test_each_trajectory_gets_its_own_spare_notebook(start_sandbox: StartSandbox) -> None:
    async with start_sandbox(spare_notebooks=_SPARE) as client:
        await find_spare_processes(client, _SPARE)
        cells = [client.cell(f"import os\nx = {number}\nos.getpid()", number) for number in range(2 * _SPARE)]
        assert all(isinstance(result.outcome, CodeOk) for result in await asyncio.gather(*cells))
        texts = [await client.printed("x, len(globals()) > 2", number) for number in range(2 * _SPARE)]
        assert texts == [f"({number}, True)\n" for number in range(2 * _SPARE)]


async def test_used_and_dead_spare_notebooks_are_replaced(start_sandbox: StartSandbox) -> None:
    async with start_sandbox(spare_notebooks=_SPARE) as client:
        first = await find_spare_processes(client, _SPARE)
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        second = await find_spare_processes(client, _SPARE, replaced=first)
        for number in range(_SPARE):
            assert await client.printed("1 + 1", number) == "2\n"
            await client.sandbox.end_notebook(number)
        assert await find_spare_processes(client, _SPARE, replaced=second)


async def test_a_spare_notebook_without_its_worker_runs_its_first_cell(start_sandbox: StartSandbox) -> None:
    async with start_sandbox(spare_notebooks=1) as client:
        (spare,) = await find_spare_processes(client, 1)
        os.kill(list_children(spare)[0], signal.SIGKILL)
        assert await client.printed("import math\nx = 5\nmath.pi > 3") == "True\n"
        assert await client.printed("x") == "5\n"


def test_spare_notebooks_count_as_live_ones() -> None:
    config = SandboxConfig(max_live_notebooks=100, spare_notebooks=8, fork_servers=2)
    assert (config.spare_notebooks_per_server, config.max_notebooks_in_use) == (8, 52)
    config = SandboxConfig(max_live_notebooks=100, spare_notebooks=64)
    assert (config.spare_notebooks_per_server, config.max_notebooks_in_use) == (16, 52)
    config = SandboxConfig(max_live_notebooks=2)
    assert (config.spare_notebooks_per_server, config.max_notebooks_in_use) == (0, 2)
