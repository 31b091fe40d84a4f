"""Tests of notebooks that a fork server forks ahead of their first cells."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

import pytest

from asterism.bus.messages import CodeCrashed, CodeOk, CodeRequested, Output
from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.preloads import Preload
from tests.processes import family, is_running, list_children, process_state
from tests.sandbox.conftest import Client, StartSandbox, nightly_in_containers, wait_for_outcome

pytestmark = [pytest.mark.real_clock, pytest.mark.slow]
_SPARE = 3
LIMITS = {"spare_notebooks": _SPARE}
_WARM_PROCESSES = 4  # processes that the server forks before the spare notebooks
_IMPORTS = {"bare": "", "numpy": "import numpy", "scientific": "import sympy"}
# Print the state that a cell can read of its process, except times, addresses and true random numbers.
_STATE = """
import _thread, os, random, resource, signal, sys
def is_open(fd):
    try: os.fstat(fd)
    except OSError: return False
    return True
in_namespaces = os.getppid() == 1
print(in_namespaces and (os.getpid(), _thread.get_native_id(), os.getcwd()), os.getpgrp() == os.getpid())
print(random.random(), hash("a"), {"x", "yy", "zzz"})
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), [str(signal.getsignal(n)) for n in range(1, 64)])
print([resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")])
print(os.nice(0), os.umask(0o77), os.getpriority(os.PRIO_PROCESS, 0), _thread._count())
print(os.listdir("."), sys.argv, sys.path, sorted(sys.modules), sorted(globals()), sorted(os.environ), __name__)
print([fd for fd in range(64) if is_open(fd)], resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime)
numpy, sympy = sys.modules.get("numpy"), sys.modules.get("sympy")
print(numpy and (numpy.random.rand(3), numpy.random.default_rng().random(3)), sympy and sympy.core.random.random())
"""


def list_spare_processes(client: Client, preload: Preload = "bare") -> list[int]:
    """Return the first processes of notebooks without checkpoints, which have exactly one child."""
    servers = client.sandbox._pools[preload].server_pids  # pyright: ignore[reportPrivateUsage]
    children = {pid: list_children(pid) for pid in family(*servers)}
    calls = max(children.values(), key=len, default=[])
    if len(calls) < _WARM_PROCESSES:  # the server is starting
        return []
    return [pid for pid in calls if len(children.get(pid, ())) == 1]


async def find_spare_processes(
    client: Client, count: int, replaced: Sequence[int] = (), preload: Preload = "bare"
) -> list[int]:
    """Wait for `count` spare processes that are not in `replaced`, while calls run. Raises TimeoutError."""
    async with asyncio.timeout(30):
        while len(spare := list_spare_processes(client, preload)) != count or not {*spare}.isdisjoint(replaced):
            await client.program(f"{_IMPORTS[preload]}\npass")
    return spare


async def wait_for_ends(client: Client, pids: Sequence[int]) -> None:
    """Wait until the processes have ended and are reaped. Raises TimeoutError."""
    async with asyncio.timeout(30):
        while any(process_state(pid) != "X" for pid in pids):
            with contextlib.suppress(SandboxFailure):  # the call fails if a test has killed the fork server
                await client.program("pass")


def end_spare_notebooks(client: Client, pause_s: float) -> None:
    for pool in client.sandbox._pools.values():  # pyright: ignore[reportPrivateUsage]
        pool.end_spare_notebooks(pause_s)


async def run_cells(client: Client, first: str) -> list[str]:
    """Return the outputs of three cells of trajectory 1, and end its notebook."""
    calls = [
        CodeRequested(1, number, "jupyter_code", code, "")
        for number, code in enumerate((first, "import random\nrandom.random()", "in_namespaces"))
    ]
    outcomes = [(await client.sandbox.run(call)).outcome for call in calls]
    await client.sandbox.end_notebook(1)
    assert all(isinstance(outcome, CodeOk) for outcome in outcomes), outcomes
    return [outcome.output.stdout for outcome in outcomes if isinstance(outcome, CodeOk)]


async def test_each_trajectory_gets_its_own_spare_notebook(client: Client) -> None:
    await find_spare_processes(client, _SPARE)
    cells = [
        client.cell(f"x = {number}\nopen('f{number}', 'w').close()\nopen('/tmp/t{number}', 'w').close()", number)
        for number in range(2 * _SPARE)
    ]
    outcomes = [result.outcome for result in await asyncio.gather(*cells)]
    assert all(isinstance(outcome, CodeOk) for outcome in outcomes), outcomes
    code = "import os\nx, [n for n in os.listdir('.') if n[0] == 'f']"
    texts = [await client.printed(code, number) for number in range(2 * _SPARE)]
    assert texts == [f"({number}, ['f{number}'])\n" for number in range(2 * _SPARE)]


@nightly_in_containers
async def test_used_and_killed_spare_notebooks_are_replaced(client: Client) -> None:
    first = await find_spare_processes(client, _SPARE)
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    second = await find_spare_processes(client, _SPARE, replaced=first)
    for number in range(_SPARE):
        assert await client.printed("1 + 1", number) == "2\n"
        await client.end(number)
    assert await find_spare_processes(client, _SPARE, replaced=second)


@nightly_in_containers
async def test_a_spare_notebook_without_its_worker_runs_its_first_cell(start_sandbox: StartSandbox) -> None:
    async with start_sandbox(spare_notebooks=1) as client:
        (spare,) = await find_spare_processes(client, 1)
        os.kill(list_children(spare)[0], signal.SIGKILL)
        assert await client.printed("import math\nx = 5\nmath.pi > 3") == "True\n"
        assert await client.printed("x") == "5\n"


@pytest.mark.parametrize(
    ("preload", "namespaces"),
    [
        ("bare", "auto"),
        *[pytest.param(*each, marks=nightly_in_containers) for each in (("numpy", "auto"), ("scientific", "auto"))],
        pytest.param("bare", "off", marks=nightly_in_containers),
    ],
)
async def test_a_cell_runs_in_the_same_environment_in_a_spare_notebook(
    start_sandbox: StartSandbox, preload: Preload, namespaces: str
) -> None:
    async with start_sandbox(spare_notebooks=1, namespaces=namespaces) as client:
        await client.program(_IMPORTS[preload])  # this call starts the fork server
        (spare,) = await find_spare_processes(client, 1, preload=preload)
        printed = [await run_cells(client, f"{_IMPORTS[preload]}\n{_STATE}")]
        await wait_for_ends(client, [spare])  # the notebook used the spare process
        end_spare_notebooks(client, pause_s=3600.0)
        await find_spare_processes(client, 0, preload=preload)
        printed.append(await run_cells(client, f"{_IMPORTS[preload]}\n{_STATE}"))
        assert printed[0] == printed[1]


@nightly_in_containers
async def test_a_first_cell_that_kills_its_process_leaves_an_empty_notebook(start_sandbox: StartSandbox) -> None:
    async with start_sandbox(spare_notebooks=1) as client:
        (spare,) = await find_spare_processes(client, 1)
        assert (await client.cell("import os\nx = 1\nos._exit(3)")).outcome == CodeCrashed(Output(), 3)
        assert await client.printed("import math\n'x' in globals(), math.floor(2.5)") == "(False, 2)\n"
        assert is_running(spare)
        await client.sandbox.end_notebook(0)
        await wait_for_ends(client, [spare])


@nightly_in_containers
async def test_ended_spare_notebooks_leave_no_process_and_return_after_the_pause(start_sandbox: StartSandbox) -> None:
    async with start_sandbox(spare_notebooks=_SPARE) as client:
        assert await client.printed("x = 1\nx", 7) == "1\n"
        await client.sandbox.end_notebook(7)
        first = await find_spare_processes(client, _SPARE)
        processes = family(*first)
        assert len(processes) == 2 * _SPARE
        end_spare_notebooks(client, pause_s=0.0)
        second = await find_spare_processes(client, _SPARE, replaced=first)
        await wait_for_ends(client, processes)
        end_spare_notebooks(client, pause_s=3600.0)
        await wait_for_ends(client, family(*second))
        assert await client.printed("x = 2\nx", 0) == "2\n"  # the notebook was forked on demand
        await client.sandbox.end_notebook(0)
        for _ in range(3):
            await client.program("pass")
        assert list_spare_processes(client) == []


@nightly_in_containers
async def test_a_full_machine_ends_spare_notebooks_and_keeps_notebooks_in_use(
    start_sandbox: StartSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_sandbox(spare_notebooks=_SPARE) as client:
        spare = await find_spare_processes(client, _SPARE)
        assert await client.printed("x = 5\nx") == "5\n"
        live = await find_spare_processes(client, _SPARE + 1)  # includes the notebook in use
        looks = iter([1])  # excess bytes at the first measurement
        host = client.sandbox._host  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(host, "get_excess_memory", lambda share: next(looks, 0))  # pyright: ignore
        (kept,) = await find_spare_processes(client, 1)
        await wait_for_ends(client, [pid for pid in live if pid != kept])
        assert kept in spare
        assert await client.printed("x") == "5\n"
        assert is_running(kept)


@nightly_in_containers
async def test_a_killed_fork_server_leaves_no_spare_notebook_and_the_next_server_forks_new_notebooks(
    start_sandbox: StartSandbox,
) -> None:
    async with start_sandbox(spare_notebooks=_SPARE) as client:
        first = await find_spare_processes(client, _SPARE)
        processes = family(*first)
        (server,) = client.sandbox._pools["bare"].server_pids  # pyright: ignore[reportPrivateUsage]
        os.kill(server, signal.SIGKILL)
        await wait_for_ends(client, processes)
        await asyncio.wait_for(wait_for_outcome(client), 30)
        await find_spare_processes(client, _SPARE, replaced=first)


def test_spare_notebooks_count_as_live_notebooks() -> None:
    config = SandboxConfig(max_live_notebooks=100, spare_notebooks=8, fork_servers=2)
    assert (config.spare_notebooks_per_server, config.max_notebooks_in_use) == (8, 52)
    config = SandboxConfig(max_live_notebooks=100, spare_notebooks=64)
    assert (config.spare_notebooks_per_server, config.max_notebooks_in_use) == (16, 52)
    config = SandboxConfig(max_live_notebooks=2)
    assert (config.spare_notebooks_per_server, config.max_notebooks_in_use) == (0, 2)
