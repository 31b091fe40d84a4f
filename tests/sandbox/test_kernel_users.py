"""A call takes no resource that the kernel counts by user from another call."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asterism.bus.messages import CodeOutcome, CodeOutOfMemory
from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.isolation import format_isolation
from tests.processes import family
from tests.sandbox.conftest import PARAMETERS, Client, StartSandbox, get_text, lend, nightly_in_containers, open_sandbox
from tests.sandbox.kernel_counters import COUNTERS

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]
LIMITS: dict[str, Any] = {"time_limit_s": 8.0, "max_processes": 16, "spare_notebooks": 2}
NUM_NOTEBOOKS = 5  # pipes of four notebooks exceed one user's limit; the pipes of the fifth have the smallest size
WATCHES_PER_NOTEBOOK = 100_000  # minimum number of watches that a notebook takes
WATCHER_MIB = 128  # twice the memory of a notebook with its children and watches
# If calls share one user, the fork server ends calls that hold more than a share of these resources.
SHARED = ["pipe pages", "descriptors in flight", "epoll watches"]
# Calls that take epoll watches use much CPU time, and the nightly test below takes all watches of a user.
EACH_COUNTER = [pytest.param(name, marks=[pytest.mark.nightly] * (name == "epoll watches")) for name in COUNTERS]


@pytest.fixture(scope="module", params=PARAMETERS)
def sharing_sandbox(request: pytest.FixtureRequest, loop: asyncio.Runner) -> Iterator[Client]:
    """Start a sandbox whose calls share one user, as in an executor that is not root."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("asterism.sandbox.hosts.local_host", "asterism.sandbox.hosts.docker.container"):
            patch.setattr(f"{module}.may_map_users", lambda _: False)  # pyright: ignore
        context = open_sandbox(request.param, None, **LIMITS)
        client = loop.run(context.__aenter__())
        assert not client.isolation.kernel_users
        yield client
        loop.run(context.__aexit__(None, None, None))


@pytest.fixture
def sharing_client(sharing_sandbox: Client, loop: asyncio.Runner) -> Iterator[Client]:
    yield from lend(sharing_sandbox, loop)


async def run_innocents(client: Client, code: str) -> list[str | CodeOutcome]:
    """Run the code as programs, in a new notebook, and in a notebook that is older than the greedy calls."""
    results = [await client.program(code) for _ in range(4)]
    results += [await client.cell(code, 500), await client.cell(code, 1)]
    return [get_text(result) for result in results]


def list_kernel_users(client: Client) -> list[int]:
    """Return the kernel users of each fork server and call; each of them has its own pid namespace."""
    users: dict[int, set[int]] = {}
    for pid in family(*client.sandbox.server_pids):
        status = Path(f"/proc/{pid}/status").read_text()
        user = int(status.split("\nUid:")[1].split()[0])
        users.setdefault(Path(f"/proc/{pid}/ns/pid").stat().st_ino, set()).add(user)
    for pid in client.sandbox.server_pids:  # this process waits outside the fork server's namespace
        users.pop(Path(f"/proc/{pid}/ns/pid").stat().st_ino, None)
    return [user for own in users.values() for user in own]


def read_max_user_watches() -> int:
    return int(Path("/proc/sys/fs/epoll/max_user_watches").read_text())


def make_room_for(num_notebooks: int) -> dict[str, Any]:
    live = max(512, 2 * num_notebooks)  # includes the spare notebooks
    return {
        "max_live_notebooks": live,
        "container_processes": live * (LIMITS["max_processes"] + 2) + 1024,
        "container_memory_mib": max(8192, num_notebooks * WATCHER_MIB),
        "notebook_memory_share": 1.0,
    }


def count_watches(pid: int) -> int:
    """Count the epoll watches of a process. All its polls watch the same descriptors."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended in the meantime
        polls = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if str(fd.readlink()) == "anon_inode:[eventpoll]"]
        return len(polls) * Path(f"/proc/{pid}/fdinfo/{polls[0].name}").read_text().count("\ntfd:") if polls else 0
    return 0


async def test_each_call_and_each_fork_server_has_its_own_kernel_user(client: Client) -> None:
    assert client.isolation.kernel_users
    assert "; kernel users: one per call; " in format_isolation(client.isolation)
    cells = [client.printed("import os\nkept = os.fork() or os._exit(0)\nos.getuid()", number) for number in range(4)]
    assert await asyncio.gather(*cells) == ["65534\n"] * 4  # in its namespace, a call has the number of an unknown user
    async with asyncio.timeout(30):
        while len(users := list_kernel_users(client)) != len(set(users)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # a spare notebook gets its user after its fork
    assert len(users) >= 6
    assert min(users) >= 2_500_000_000


async def meet_idle_notebooks(client: Client, counter: str, pause_s: float) -> list[str | CodeOutcome]:
    """Check that greedy notebooks harm no innocent call, and return their outputs."""
    greedy, innocent = COUNTERS[counter]
    assert await run_innocents(client, innocent) == ["right\n"] * 6
    servers = client.sandbox.server_pids
    texts = [get_text(await client.cell(greedy, 100 + number)) for number in range(NUM_NOTEBOOKS)]
    await asyncio.sleep(pause_s)
    assert await run_innocents(client, innocent) == ["right\n"] * 6
    assert client.sandbox.server_pids == servers
    return texts


@pytest.mark.parametrize("counter", EACH_COUNTER)
async def test_an_idle_notebook_takes_no_resource_that_the_kernel_counts_by_user(client: Client, counter: str) -> None:
    assert all(int(str(text)) > 10 for text in await meet_idle_notebooks(client, counter, 0.0))


@pytest.mark.parametrize("counter", EACH_COUNTER)
async def test_a_running_program_takes_no_resource_that_the_kernel_counts_by_user(client: Client, counter: str) -> None:
    greedy, innocent = COUNTERS[counter]
    programs = [asyncio.create_task(client.program(greedy + "\nimport time\ntime.sleep(600)")) for _ in range(5)]
    await client.program("import time\ntime.sleep(1)")  # the greedy programs hold all units when this program ends
    assert await run_innocents(client, innocent) == ["right\n"] * 6
    for program in programs:
        program.cancel()
    ends = await asyncio.gather(*programs, return_exceptions=True)
    assert [end for end in ends if isinstance(end, SandboxFailure)] == []


@pytest.mark.nightly
async def test_many_notebooks_leave_epoll_watches_for_the_fork_server(start_sandbox: StartSandbox) -> None:
    """The watches of one user can fill 4 % of the machine's memory; these are five million for 24 GiB."""
    greedy, innocent = COUNTERS["epoll watches"]
    most_of_user = read_max_user_watches()
    num_notebooks = most_of_user // WATCHES_PER_NOTEBOOK + 2  # at least two notebooks
    async with start_sandbox(120 + 2 * num_notebooks, **LIMITS, **make_room_for(num_notebooks)) as client:
        servers = client.sandbox.server_pids
        taken = 0
        for number in range(num_notebooks):
            taken += int(await client.printed(greedy, 100 + number))
            if taken > most_of_user:
                break
        assert await run_innocents(client, innocent) == ["right\n"] * 6
        assert client.sandbox.server_pids == servers
        assert sum(map(count_watches, family(*servers))) >= taken > most_of_user  # no notebook has lost a watch


@pytest.mark.parametrize("counter", SHARED)
async def test_a_program_beyond_its_share_is_killed_if_calls_share_a_user(sharing_client: Client, counter: str) -> None:
    greedy, innocent = COUNTERS[counter]
    result = await sharing_client.program(greedy + "\nimport time\ntime.sleep(60)")
    assert isinstance(result.outcome, CodeOutOfMemory)
    assert await run_innocents(sharing_client, innocent) == ["right\n"] * 6


@nightly_in_containers
@pytest.mark.parametrize("counter", EACH_COUNTER)
async def test_greedy_notebooks_are_killed_if_calls_share_a_user(sharing_client: Client, counter: str) -> None:
    # The fork server checks the idle notebooks within this time.
    await meet_idle_notebooks(sharing_client, counter, 0.5)
