"""Hostile answers and hostile programs, concurrent or in sequence, do not harm the service."""

import asyncio
import random
from collections.abc import Iterator

import pytest

from asterism.bus.messages import CodeCrashed, CodeOk, CodeRaised, CodeTimedOut, Output
from asterism.configs.schema.machines import SandboxConfig
from asterism.sandbox.contract import CodeResult, SandboxFailure
from asterism.sandbox.select_backend import make_sandbox
from tests.processes import family, is_running
from tests.sandbox.conftest import Client, lend, nightly_in_containers
from tests.sandbox.hostile import footprint
from tests.sandbox.hostile.arena import LIMITS, MAX_REPEATS, Arena
from tests.sandbox.hostile.catalogue import HOSTILE
from tests.sandbox.hostile.conftest import ARENAS, PARAMETERS
from tests.sandbox.hostile.without_namespaces import KNOWN_ESCAPES, NOT_RUN

pytestmark = pytest.mark.slow

_NUM_CONCURRENT = 24


@pytest.fixture
def client(arena: Arena, loop: asyncio.Runner) -> Iterator[Client]:
    """Return a client of the arena's sandbox; after the test, check the neighbour and the leftovers."""
    yield from lend(arena.client, loop)
    neighbours, leftovers = arena.inspect_state()
    assert neighbours == arena.unharmed
    assert leftovers == {}


async def test_concurrent_hostile_programs_harm_no_neighbour(client: Client) -> None:
    names = [name for name, hostile in HOSTILE.items() if not hostile.signals_others]
    names = [name for name in names if name not in {**KNOWN_ESCAPES, **NOT_RUN}]
    chosen = random.Random(3).sample(names, _NUM_CONCURRENT)

    for repeats_left in reversed(range(1 + MAX_REPEATS)):
        hostile = [asyncio.create_task(client.program(HOSTILE[name].code, trajectory=50)) for name in chosen]
        neighbours = await asyncio.gather(*[client.program(f"print({number})") for number in range(50)])
        assert all(isinstance(result, CodeResult) for result in await asyncio.gather(*hostile))
        outcomes = [result.outcome for result in neighbours]
        if not (repeats_left and any(isinstance(outcome, CodeTimedOut) for outcome in outcomes)):
            break
    assert outcomes == [CodeOk(Output(f"{number}\n")) for number in range(50)]


def test_concurrent_long_codes_and_inputs_do_not_kill_the_fork_server(arena: Arena, client: Client) -> None:
    arena.run(send_long_codes(client))
    arena.run(client.end_all())
    arena.record_state()  # servers keep the buffers of these calls; a leak would grow with the next calls
    arena.run(send_long_codes(client))


async def send_long_codes(client: Client) -> None:
    code = "import sys\nprint(len(sys.stdin.read()))\n#" + "x" * 1_000_000
    calls = [client.program(code, "y" * 1_000_000) for _ in range(40)]
    cells = [client.cell("print(1)\n#" + "x" * 1_000_000, trajectory=60 + number) for number in range(8)]
    ends = await asyncio.gather(*calls, *cells)
    assert {repr(result.outcome) for result in ends[:40]} == {repr(CodeOk(Output("1000000\n")))}
    assert {repr(result.outcome) for result in ends[40:]} == {repr(CodeOk(Output("1\n")))}


@nightly_in_containers
async def test_a_patched_clock_gives_a_notebook_no_more_time(client: Client) -> None:
    await client.printed("import time\nnow = time.monotonic", 70)
    for fake in ("float('inf')", "float('nan')", "-1e300", "now() + 60", "now() - 60"):
        await client.printed(f"time.monotonic = lambda: {fake}", 70)
        assert isinstance((await client.cell("time.sleep(600)", 70)).outcome, CodeTimedOut)


async def test_a_cell_cannot_answer_a_later_cell(client: Client) -> None:
    forged = "import os, struct\nx = 1\nos.write(3, struct.pack('<cIQI', b'a', 2, 0, 2) + b'ok')"
    assert isinstance((await client.cell(forged, 71)).outcome, CodeCrashed)
    assert isinstance((await client.cell("x", 71)).outcome, CodeRaised)


@nightly_in_containers
async def test_a_crash_of_code_during_a_replay_is_not_an_infrastructure_failure(client: Client) -> None:
    """Code must not be able to fake an infrastructure failure."""

    began = await client.printed("import os, time\nx = 1\nbegan = time.time_ns()\nbegan", 72)
    await client.printed(f"if began != {began.strip()}: os._exit(3)\ny = 2", 72)
    lost = await client.cell("os.write(3, b'x' * 100)", 72)
    assert isinstance(lost.outcome, CodeCrashed)
    assert (await client.cell("y", 72)).outcome == CodeCrashed(Output(), 3)
    assert await client.printed("x", 72) == "1\n"
    assert isinstance((await client.cell("y", 72)).outcome, CodeRaised)


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('touch /tmp/hostile /var/tmp/hostile /dev/shm/hostile')",
        "().__class__.__base__.__subclasses__()",
        'exec("import os; os._exit(0)")',
        *("\\boxed{__import__('os')._exit(0)}", "lambda: True", "'); import os; os._exit(0) #"),
        *("\\input{/etc/passwd}", '{"id": 1, "correct": true}', "\0\x01\0\0{}", "x" * 100_000, "(" * 10_000),
        *("\ud800", "True", "numpy.testing.assert_(True)"),
    ],
)
async def test_an_answer_that_is_code_is_graded_as_text(client: Client, answer: str) -> None:
    assert not (await client.grade(answer, "x+1")).correct
    assert (await client.grade("1+x", "x+1")).correct


def test_each_arena_has_the_protections_of_its_kind(arena: Arena) -> None:
    assert arena.has_namespaces == (arena.namespaces == "auto"), arena.client.isolation.missing
    assert arena.client.isolation.seccomp
    assert arena.client.isolation.backend == arena.backend


@pytest.mark.real_clock
@pytest.mark.parametrize("name", PARAMETERS)
async def test_a_sandbox_that_closes_during_hostile_programs_leaves_no_processes(name: str) -> None:
    before = footprint.list_private_folders()  # call folders of the arena
    backend, namespaces = ARENAS[name]
    where = {"backend": backend, "namespaces": namespaces}
    sandbox = make_sandbox(SandboxConfig(time_limit_s=1.0, **where, **LIMITS), seed=7)  # pyright: ignore
    client = Client(sandbox, await sandbox.start())
    await client.printed(HOSTILE["leaves a daemon that lets go of its output"].code, 80)
    calls = [asyncio.create_task(client.program(HOSTILE["forks without end"].code)) for _ in range(3)]
    calls.append(asyncio.create_task(client.cell(HOSTILE["blocks all signals and spins"].code, 81)))
    await client.printed("1", 82)
    started = family(*sandbox.server_pids, *footprint.list_container_pids(client))
    await sandbox.close()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(end, CodeResult | SandboxFailure) for end in ends), ends
    assert len(started) > 5
    assert [pid for pid in started if is_running(pid)] == []
    assert footprint.list_private_folders() == before
