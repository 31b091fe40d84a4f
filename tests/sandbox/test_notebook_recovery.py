"""State, output and processes of a notebook after a crash of a cell."""

import asyncio
import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from asterism.bus.messages import CodeCrashed, CodeOutcome, CodeOutOfMemory, CodeRaised, CodeTimedOut, Output
from asterism.sandbox.fork_server_sandbox import ForkServerSandbox
from asterism.sandbox.hosts.docker.docker_host import ContainerHost
from asterism.sandbox.hosts.local_host import LocalHost
from tests.processes import family, wait_for_end
from tests.sandbox.conftest import Client, StartSandbox, nightly_in_containers

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]

LIMIT_S = 0.6
LIMITS = {"time_limit_s": LIMIT_S, "memory_mib": 256}
# State that a rerun cannot reproduce: a time, and the address of an object.
SETUP = "import time\nt = time.time_ns()\nkept = [object()]"
INSPECT = "t, id(kept[0]), len(kept)"
SHARED = (  # code that finds the memory in which the notebook's processes store the current worker
    "import sys\nframe = sys._getframe()\nwhile not hasattr(frame.f_locals.get('self'), '_shared'): frame = frame.f_back\n"
    "shared = frame.f_locals['self']._shared\n"
)
# By name: the last lines of a cell, and the cell's outcome.
ENDINGS: dict[str, tuple[str, CodeOutcome | type[CodeOutcome]]] = {
    "loops": ("while True: pass", CodeTimedOut(Output("out\n", "err\n"), LIMIT_S)),
    "sleeps": ("time.sleep(60)", CodeTimedOut(Output("out\n", "err\n"), LIMIT_S)),
    "blocks all signals": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(60)",
        CodeTimedOut(Output("out\n", "err\n"), LIMIT_S),
    ),
    "reads an invalid address": ("import ctypes; ctypes.string_at(0)", CodeCrashed(Output("out\n", "err\n"), -11)),
    "os._exit": ("import os; os._exit(5)", CodeCrashed(Output("out\n", "err\n"), 5)),
    "exit": ("exit()", CodeCrashed(Output("out\n", "err\n"), 0)),
    "sys.exit": ("sys.exit(3)", CodeCrashed(Output("out\n", "err\n"), 3)),
    "aborts": ("import os; os.abort()", CodeCrashed(Output("out\n", "err\n"), -6)),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", CodeCrashed(Output("out\n", "err\n"), -9)),
    "signals its process group": ("import os; os.kill(0, 15)", CodeCrashed(Output("out\n", "err\n"), -15)),
    "signals all processes": ("import os; os.kill(-1, 15); os._exit(4)", CodeCrashed(Output("out\n", "err\n"), 4)),
    "closes its socket": ("import os; os.close(3)", CodeCrashed),
    "closes everything": ("import os; os.closerange(0, 256)", CodeCrashed),
    "removes functions of the harness": ("import os; os.write = os.getpid = None", CodeCrashed),
    "leaves only a fork": ("import os\nif os.fork(): os._exit(6)\ntime.sleep(60)", CodeCrashed),
}
FORK_BOMB = {
    "forks without end": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", CodeTimedOut)
}
IN_CONTAINERS = ("loops", "os._exit", "signals all processes")
HARMS = {
    "no worker": f"{SHARED}shared[:] = bytes(len(shared))\nos.kill(os.getpid(), 9)",
    "wrong worker": f"{SHARED}shared[:] = b'\\xff' * len(shared)\nos.kill(os.getpid(), 9)",
    "no shared memory": f"{SHARED}shared.close()",
    "all processes killed": "os.kill(-1, 9)\nos._exit(1)",
    "noise on the socket": "os.write(3, b'x' * 1000)",
    "stopped checkpoint": "for pid in range(2, 64):\n    if pid != os.getpid():\n        try: os.kill(pid, 19)\n        except OSError: pass\nos._exit(1)",
}
WITHOUT_NAMESPACES = ("loops", "os._exit", "kills itself", "closes its socket", "leaves only a fork")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[nightly_in_containers] * (name not in IN_CONTAINERS)) for name in ENDINGS]
)
async def test_a_crashed_cell_does_not_change_the_state(client: Client, name: str) -> None:
    code, ending = ENDINGS[name]
    dies = f"import sys\nprint('out')\nprint('err', file=sys.stderr)\nkept.append('lost')\nt = 0\n{code}"
    await client.printed(SETUP)
    before = await client.printed(INSPECT)
    for _ in range(2):
        outcome = (await client.cell(dies)).outcome
        assert isinstance(outcome, ending) if isinstance(ending, type) else outcome == ending
        assert await client.printed(INSPECT) == before
    assert await client.printed("kept.append(1)\nlen(kept)") == "2\n"


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ({"namespaces": "off"}, WITHOUT_NAMESPACES),
        # Its processes wait for each other until the end of the extension.
        pytest.param({"max_call_extension": 6.0}, FORK_BOMB, marks=nightly_in_containers),
    ],
    ids=["without namespaces", "fork bomb"],
)
async def test_with_other_limits_a_crashed_cell_does_not_change_the_state(
    start_sandbox: StartSandbox, limits: dict[str, Any], names: Iterable[str]
) -> None:
    async with start_sandbox(time_limit_s=LIMIT_S, **limits) as client:
        await client.printed(SETUP)
        before = await client.printed(INSPECT)
        for name in names:
            code, ending = {**ENDINGS, **FORK_BOMB}[name]
            outcome = (await client.cell(f"kept.append('lost')\n{code}")).outcome
            assert isinstance(outcome, ending if isinstance(ending, type) else type(ending)), name
            assert await client.printed(INSPECT) == before, name


@nightly_in_containers
async def test_a_cell_keeps_its_effects_before_an_error(client: Client) -> None:
    await client.printed(SETUP)
    before = await client.printed("t")
    assert isinstance((await client.cell("kept.append(1)\n1 / 0")).outcome, CodeRaised)
    assert isinstance((await client.cell("kept.append(2)\nx = bytearray(1 << 30)")).outcome, CodeOutOfMemory)
    assert await client.printed("len(kept), t") == f"(3, {before.strip()})\n"


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(code, id=name, marks=[nightly_in_containers] * (name != "all processes killed"))
        for name, code in HARMS.items()
    ],
)
async def test_a_cell_that_damages_its_notebook_loses_no_variables_and_affects_no_other_notebook(
    client: Client, harm: str
) -> None:
    if not client.isolation.namespaces:
        pytest.fail("this suite needs namespaces")
    await client.printed(SETUP, trajectory=1)
    neighbour = await client.printed(INSPECT, trajectory=1)
    await client.printed("x = 1\nnames = ['kept']")
    await client.printed("y = x + 1")
    outcome = (await client.cell(f"import os\nnames.append('lost')\n{harm}")).outcome
    assert isinstance(outcome, CodeCrashed | CodeTimedOut)
    assert await client.printed("x, y, names") == "(1, 2, ['kept'])\n"
    assert await client.printed(INSPECT, trajectory=1) == neighbour


@nightly_in_containers
async def test_a_cell_that_kills_only_its_checkpoint_continues(client: Client) -> None:
    kills = "for pid in range(2, 64):\n    if pid != os.getpid():\n        try: os.kill(pid, 9)\n        except OSError: pass\n"
    await client.printed(f"import os\n{SETUP}")
    before = await client.printed(INSPECT)
    for _ in range(3):
        await client.printed(kills)
        assert await client.printed(INSPECT) == before
    assert isinstance((await client.cell("os._exit(1)")).outcome, CodeCrashed)
    assert await client.printed(INSPECT) == before


@nightly_in_containers
async def test_cells_without_a_checkpoint_are_replayed(client: Client) -> None:
    """Pure cells make no checkpoint; the cells before the pure cells make a checkpoint."""
    await client.printed(SETUP)
    before = await client.printed(INSPECT)
    await client.printed("x = 0\nwords = []")
    for number in range(20):
        await client.printed(f"x += {number}\nlast = f'{{x:>5}}'")
    assert isinstance((await client.cell("x = 1 / 0")).outcome, CodeRaised)
    assert isinstance((await client.cell("x = -1\nsum(range(10 ** 12))")).outcome, CodeTimedOut)
    assert await client.printed("x, last") == "(190, '  190')\n"
    assert await client.printed(INSPECT) == before
    assert isinstance((await client.cell("exit()")).outcome, CodeCrashed)
    assert await client.printed("x, last, len(words)") == "(190, '  190', 0)\n"
    assert await client.printed(INSPECT) == before


@nightly_in_containers
async def test_a_long_notebook_continues_after_many_crashed_cells(client: Client) -> None:
    await client.printed(SETUP + "\nimport os, math\ntotal = 0\ndef add(n):\n    global total\n    total += n")
    before = await client.printed(INSPECT)
    for number in range(30):
        await client.printed(f"add({number})" if number % 2 else f"total += {number}")
        if number % 3 == 0:
            assert isinstance((await client.cell("add(1000)\nos._exit(1)")).outcome, CodeCrashed)
    assert await client.printed("total") == f"{sum(range(30))}\n"
    assert await client.printed(INSPECT) == before


async def test_processes_of_a_crashed_cell_are_killed_and_earlier_processes_continue(client: Client) -> None:
    daemon = (
        "import os, ctypes, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
        "    ctypes.CDLL(None).prctl(15, b'{name}')\n    time.sleep(600)\nos.wait()\n"
    )
    await client.printed(daemon.format(name="before"))
    await client.printed(SETUP)
    before = await client.printed(INSPECT)
    for end in ("while True: pass", "os._exit(1)"):
        outcome = (await client.cell(f"{daemon.format(name='lost')}{end}")).outcome
        assert isinstance(outcome, CodeTimedOut | CodeCrashed)
        # The processes are killed before the answer, but can still be exiting.
        for pidfd in open_pidfds(client.sandbox, "lost"):
            wait_for_end(pidfd)
        (pidfd,) = open_pidfds(client.sandbox, "before")
        os.close(pidfd)
    assert await client.printed(INSPECT) == before


@nightly_in_containers
async def test_a_child_process_stays_with_the_notebook_until_it_is_reaped(start_sandbox: StartSandbox) -> None:
    start = (
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'print(input())'], "
        "stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)"
    )
    async with start_sandbox(time_limit_s=60.0) as client:
        await client.printed(start)
        await client.printed("answer = child.communicate('hello')[0]")
        assert await client.printed("answer, child.returncode") == "('hello\\n', 0)\n"
        await client.printed(start)
        assert isinstance((await client.cell("import os; os._exit(1)")).outcome, CodeCrashed)
        assert await client.printed("child.communicate('again')[0]") == "'again\\n'\n"


@nightly_in_containers
async def test_threads_timers_and_the_process_id_persist_between_cells(client: Client) -> None:
    await client.printed("import os, signal, threading\npid = os.getpid()\nstop = threading.Event()")
    await client.printed("waiting = threading.Thread(target=stop.wait)\nwaiting.start()")
    await client.printed("import math")
    assert await client.printed("waiting.is_alive(), threading.active_count()") == "(True, 2)\n"
    assert isinstance((await client.cell("os._exit(1)")).outcome, CodeCrashed)
    assert await client.printed("waiting.is_alive(), threading.active_count()") == "(True, 2)\n"
    await client.printed("stop.set()\nwaiting.join()")
    await client.printed("pid = os.getpid()\nsignal.signal(signal.SIGALRM, signal.default_int_handler)")
    await client.printed("signal.setitimer(signal.ITIMER_REAL, 1000)")
    assert await client.printed("import math\nsignal.getitimer(signal.ITIMER_REAL)[0] > 0") == "True\n"
    assert await client.printed("os.getpid() == pid") == "True\n"


@nightly_in_containers
async def test_a_checkpoint_is_not_a_child_of_the_code(client: Client) -> None:
    await client.printed("import os, math")
    for code in ("os.wait()", "os.waitpid(-1, 0)"):
        outcome = (await client.cell(code)).outcome
        assert isinstance(outcome, CodeRaised)
        assert outcome.error == "ChildProcessError: [Errno 10] No child processes"


@nightly_in_containers
async def test_signals_to_a_crashed_cell_are_not_sent_to_the_next_cell(client: Client) -> None:
    await client.printed("import os, signal\nseen = []\nsignal.signal(signal.SIGTERM, lambda *_: seen.append(1))")
    outcome = (await client.cell("os.kill(-1, 15)\nos.kill(os.getpid(), 15)\nprint(seen)\nos._exit(1)")).outcome
    assert outcome == CodeCrashed(Output("[1]\n"), 1)
    assert await client.printed("seen") == "[]\n"
    assert await client.printed("os.kill(os.getpid(), signal.SIGTERM)\nseen") == "[1]\n"


async def test_memory_of_a_checkpoint_does_not_count_as_memory_of_the_cell(client: Client) -> None:
    """A cell rewrites 150 of 256 MiB until the server has measured its memory."""
    await client.printed("import time\nx = bytearray(b'a') * (150 << 20)")
    rewrites = "until = time.monotonic() + 0.3\nwhile time.monotonic() < until:\n"
    rewrites += "    for n in range(0, len(x), 4096): x[n] = 98"
    await client.printed(rewrites)
    assert await client.printed("x[0], x[-4096]") == "(98, 98)\n"


@nightly_in_containers
async def test_notebooks_over_the_limit_keep_their_variables(start_sandbox: StartSandbox) -> None:
    async with start_sandbox(max_live_notebooks=2) as client:
        for trajectory in range(5):
            await client.printed(f"import math\nx = {trajectory}", trajectory)
        for trajectory in range(5):
            assert isinstance((await client.cell("x = None\nexit()", trajectory)).outcome, CodeCrashed)
            assert await client.printed("x, math.pi > 3", trajectory) == f"({trajectory}, True)\n"


def open_pidfds(sandbox: ForkServerSandbox, name: str) -> list[int]:
    pidfds: list[int] = []
    for pid in family(*sandbox.server_pids):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process exited in the meantime
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                pidfds.append(os.pidfd_open(pid))
    return pidfds


@nightly_in_containers
async def test_under_memory_pressure_idle_notebooks_lose_their_processes_but_no_variables(
    start_sandbox: StartSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_sandbox() as client:
        await asyncio.gather(*[client.cell(f"x = {number}", number) for number in range(20)])
        for host in (LocalHost, ContainerHost):
            monkeypatch.setattr(host, "get_excess_memory", lambda *_: 1 << 30)
        before = len(family(*client.sandbox.server_pids))
        await asyncio.gather(*[client.cell("1 + 1", 1000) for _ in range(20)])
        # Each evicted notebook has two processes, which exit a little later.
        while len(family(*client.sandbox.server_pids)) > before - 20:
            await client.printed("1 + 1", 1000)
        outputs = [await client.printed("x", number) for number in range(20)]
        assert outputs == [f"{number}\n" for number in range(20)]
