"""Tests of the table of notebooks, and of notebooks of other executors that are rebuilt from their cells."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from asterism.bus.messages import CodeOk, CodeRaised, CodeRequested, Output
from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.policies.rollout.call_transitions import keeps_effects
from asterism.sandbox.fork_server_sandbox import _COMMITTED_KINDS, parse_outcome  # pyright: ignore[reportPrivateUsage]
from asterism.sandbox.notebooks import NotebookTable
from asterism.sandbox.pool.fork_server_client import ForkServerClient
from tests.sandbox.conftest import StartSandbox

pytestmark = pytest.mark.real_clock


def make_table(num_live: int, max_live: int) -> NotebookTable:
    """Make a table with `num_live` notebooks that have a process; the first is the least recently used."""
    table = NotebookTable(max_live)
    for trajectory in range(num_live):
        notebook = table.get_or_create(trajectory, "bare")
        notebook.server = cast(ForkServerClient, SimpleNamespace(alive=True))
    return table


def test_the_least_recently_used_notebook_is_evicted_for_a_new_one() -> None:
    table = make_table(3, max_live=3)
    table.get_or_create(0, "bare")
    assert table.select_evictions(0) == []
    assert table.select_evictions(1) == [table.get_or_create(1, "bare")]


async def test_a_notebook_with_a_running_cell_is_not_evicted() -> None:
    table = make_table(2, max_live=2)
    await table.get_or_create(0, "bare").lock.acquire()
    table.get_or_create(1, "bare")
    assert table.select_evictions(1) == [table.get_or_create(1, "bare")]


def test_the_largest_notebooks_that_hold_the_excess_memory_are_evicted() -> None:
    table = make_table(8, max_live=512)
    sizes = {1: 10, 2: 30, 3: 20, 4: 5}

    def select(excess: int) -> list[int]:
        return [notebook.number for notebook in table.select_largest(excess, sizes)]

    assert [select(excess) for excess in (0, 30, 31, 1000)] == [[], [2], [2, 3], [2, 3]]
    assert make_table(0, max_live=512).select_largest(1000, sizes) == []


def make_cells(*codes: str) -> tuple[CodeRequested, ...]:
    """Make cells with even call numbers; the calls between them had no effects on the notebook."""
    return tuple(CodeRequested(5, 2 * number, "jupyter_code", code, "") for number, code in enumerate(codes))


@pytest.mark.slow
async def test_a_restored_notebook_has_its_variables_and_its_random_draws_until_its_end(
    start_sandbox: StartSandbox,
) -> None:
    async with start_sandbox() as client:
        cells = make_cells("import random\nx = random.random()\nprint('hidden')", "y = [1]\n1 / 0", "y.append(x)")
        for cell in cells:
            await client.sandbox.run(cell)
        call = CodeRequested(5, 9, "jupyter_code", "print(y, random.random())", "")
        before = (await client.sandbox.run(call)).outcome
        await client.sandbox.end_notebook(5)  # the notebook is then restored as in another executor
        client.sandbox.restore_notebook(5, cells)
        after = (await client.sandbox.run(call)).outcome
        assert isinstance(before, CodeOk)
        assert after == before
        assert before.output.stdout.startswith("[1, 0.")
        await client.sandbox.end_notebook(5)
        assert isinstance((await client.sandbox.run(call)).outcome, CodeRaised)  # neither y nor random exists


@pytest.mark.parametrize("kind", ["ok", "raised", "memory", "timeout", "died"])
def test_rollout_and_sandbox_agree_on_the_outcomes_that_keep_effects(kind: str) -> None:
    details = {"raised": ["E", "E"], "died": ["-9"]}.get(kind, [])
    streams = {"stdout": "", "stderr": "", "stdout_cut": 0, "stderr_cut": 0}
    outcome = parse_outcome({"kind": kind, "details": details, **streams}, SandboxConfig())
    assert keeps_effects(outcome) == (kind in _COMMITTED_KINDS)


@pytest.mark.slow
async def test_a_restored_cell_that_is_killed_for_its_memory_leaves_no_effects(start_sandbox: StartSandbox) -> None:
    hog = (
        "import os, time\nx = 'changed'\nfor _ in range(4):\n    if os.fork() == 0:\n"
        "        block = bytearray(b'x' * (60 << 20))\n        time.sleep(30)\ntime.sleep(30)"
    )
    async with start_sandbox(memory_mib=128) as client:
        client.sandbox.restore_notebook(5, make_cells("x = 'kept'", hog, "y = x"))
        outcome = (await client.sandbox.run(CodeRequested(5, 9, "jupyter_code", "x, y", ""))).outcome
        assert outcome == CodeOk(Output("('kept', 'kept')\n"))


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.parametrize("start_sandbox", ["docker"], indirect=True)
async def test_idle_notebooks_with_large_files_make_room_for_programs(start_sandbox: StartSandbox) -> None:
    limits = {"memory_mib": 64, "file_mib": 16, "container_memory_mib": 768}
    async with start_sandbox(time_limit_s=20.0, **limits) as client:
        table, host = client.sandbox._notebooks, client.sandbox._host  # pyright: ignore[reportPrivateUsage]
        for trajectory in range(60):
            code = "x = 1" if trajectory < 8 else "x = open('file', 'wb').write(bytes(15 << 20))"
            await client.cell(code, trajectory)
            while host.get_excess_memory(0.8) > 0:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        programs = [client.program("print(len(b'x' * (47 << 20)))") for _ in range(2)]
        outcomes = [result.outcome for result in await asyncio.gather(*programs)]
        assert outcomes == [CodeOk(Output(f"{47 << 20}\n"))] * 2
        # On a busy machine, a fork can be refused before the relief frees memory. The retry of the fork then
        # evicts the least recently used notebooks, which are the small ones.
        live = [table.get_or_create(trajectory, "bare").is_live for trajectory in range(8, 60)]
        assert not all(live)
        assert await client.printed("x", 8 + live.index(False)) == f"{15 << 20}\n"
