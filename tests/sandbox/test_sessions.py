"""Notebooks whose cells die: what is left of the state, of what they printed, and of what they started."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from bus.messages import CodeDied, CodeOk, CodeOutcome, CodeOutOfMemory, CodeRaised, CodeTimedOut, Output
from sandbox.backend import ForkServerSandbox
from sandbox.docker_backend import ContainerHost
from sandbox.process_backend import LocalHost
from tests.processes import family, wait_for_end
from tests.sandbox.conftest import Client, Play

pytestmark = pytest.mark.slow

LIMIT_S = 0.6
# What cannot be computed again: when it was, and a change that only the process knows.
MAKE = "import time\nt = time.time_ns()\nkept = [object()]"
LOOK = "t, id(kept[0]), len(kept)"
SHARED = (  # the memory in which the session's processes agree whose turn it is
    "import sys\nframe = sys._getframe()\nwhile not hasattr(frame.f_locals.get('self'), '_shared'): frame = frame.f_back\n"
    "shared = frame.f_locals['self']._shared\n"
)
# name: (the rest of a cell, how it ends)
ENDINGS: dict[str, tuple[str, CodeOutcome | type[CodeOutcome]]] = {
    "loops": ("while True: pass", CodeTimedOut(Output("out\n", "err\n"), LIMIT_S)),
    "sleeps": ("time.sleep(60)", CodeTimedOut(Output("out\n", "err\n"), LIMIT_S)),
    "does not stop at signals": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(60)",
        CodeTimedOut(Output("out\n", "err\n"), LIMIT_S),
    ),
    "reads what is not there": ("import ctypes; ctypes.string_at(0)", CodeDied(Output("out\n", "err\n"), -11)),
    "os._exit": ("import os; os._exit(5)", CodeDied(Output("out\n", "err\n"), 5)),
    "exit": ("exit()", CodeDied(Output("out\n", "err\n"), 0)),
    "sys.exit": ("sys.exit(3)", CodeDied(Output("out\n", "err\n"), 3)),
    "aborts": ("import os; os.abort()", CodeDied(Output("out\n", "err\n"), -6)),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", CodeDied(Output("out\n", "err\n"), -9)),
    "ends its process group": ("import os; os.kill(0, 15)", CodeDied(Output("out\n", "err\n"), -15)),
    "ends what it can": ("import os; os.kill(-1, 15); os._exit(4)", CodeDied(Output("out\n", "err\n"), 4)),
    "closes its socket": ("import os; os.close(3)", CodeDied),
    "closes everything": ("import os; os.closerange(0, 256)", CodeDied),
    "takes away the harness's tools": ("import os; os.write = os.getpid = None", CodeDied),
    "a fork that stays alone": ("import os\nif os.fork(): os._exit(6)\ntime.sleep(60)", CodeDied),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_after_a_cell_that_dies_the_state_is_exactly_the_one_before_it(play: Play, name: str) -> None:
    code, ending = ENDINGS[name]
    dies = f"import sys\nprint('out')\nprint('err', file=sys.stderr)\nkept.append('lost')\nt = 0\n{code}"

    async def scenario(client: Client) -> None:
        await client.printed(MAKE)
        before = await client.printed(LOOK)
        for _ in range(2):
            outcome = (await client.cell(dies)).outcome
            assert isinstance(outcome, ending) if isinstance(ending, type) else outcome == ending
            assert await client.printed(LOOK) == before
        assert await client.printed("kept.append(1)\nlen(kept)") == "2\n"

    play(scenario, time_limit_s=LIMIT_S)


def test_without_namespaces_the_state_is_as_exact(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.printed(MAKE)
        before = await client.printed(LOOK)
        for name in ("loops", "os._exit", "kills itself", "closes its socket", "a fork that stays alone"):
            code, ending = ENDINGS[name]
            outcome = (await client.cell(f"kept.append('lost')\n{code}")).outcome
            assert isinstance(outcome, ending if isinstance(ending, type) else type(ending)), name
            assert await client.printed(LOOK) == before, name

    play(scenario, time_limit_s=LIMIT_S, namespaces="off")


def test_an_error_in_a_cell_leaves_what_it_did_before(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.printed(MAKE)
        before = await client.printed("t")
        assert isinstance((await client.cell("kept.append(1)\n1 / 0")).outcome, CodeRaised)
        assert isinstance((await client.cell("kept.append(2)\nx = bytearray(1 << 30)")).outcome, CodeOutOfMemory)
        assert await client.printed("len(kept), t") == f"(3, {before.strip()})\n"

    play(scenario, memory_mib=128)


@pytest.mark.parametrize(
    "harm",
    [
        f"{SHARED}shared[:] = bytes(len(shared))\nos.kill(os.getpid(), 9)",
        f"{SHARED}shared[:] = b'\\xff' * len(shared)\nos.kill(os.getpid(), 9)",
        f"{SHARED}shared.close()",
        "os.kill(-1, 9)\nos._exit(1)",
        "os.write(3, b'x' * 1000)",
        "for pid in range(2, 64):\n    if pid != os.getpid():\n        try: os.kill(pid, 19)\n        except OSError: pass\nos._exit(1)",
    ],
    ids=[
        "no worker",
        "a wrong worker",
        "no memory",
        "everything killed",
        "noise on the socket",
        "a stopped checkpoint",
    ],
)
def test_a_cell_that_harms_its_session_costs_no_names_and_nobody_else(play: Play, harm: str) -> None:
    async def scenario(client: Client) -> None:
        if not client.isolation.namespaces:
            pytest.fail("this suite needs namespaces")
        await client.printed(MAKE, trajectory=1)
        neighbour = await client.printed(LOOK, trajectory=1)
        await client.printed("x = 1\nnames = ['kept']")
        await client.printed("y = x + 1")
        outcome = (await client.cell(f"import os\nnames.append('lost')\n{harm}")).outcome
        assert isinstance(outcome, CodeDied | CodeTimedOut)
        assert await client.printed("x, y, names") == "(1, 2, ['kept'])\n"
        assert await client.printed(LOOK, trajectory=1) == neighbour

    play(scenario, time_limit_s=LIMIT_S)


def test_a_cell_that_ends_its_checkpoint_and_nothing_else_goes_on(play: Play) -> None:
    kills = "for pid in range(2, 64):\n    if pid != os.getpid():\n        try: os.kill(pid, 9)\n        except OSError: pass\n"

    async def scenario(client: Client) -> None:
        await client.printed(f"import os\n{MAKE}")
        before = await client.printed(LOOK)
        for _ in range(3):
            await client.printed(kills)
            assert await client.printed(LOOK) == before
        assert isinstance((await client.cell("os._exit(1)")).outcome, CodeDied)
        assert await client.printed(LOOK) == before

    play(scenario)


def test_a_cell_that_cannot_be_stopped_in_time_ends_its_session_and_loses_no_names(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.printed("names = ['kept']")
        bomb = "import os\nnames.append('lost')\nwhile True:\n    try: os.fork()\n    except OSError: pass"
        neighbour = asyncio.create_task(client.program("print('unharmed')"))
        assert (await client.cell(bomb)).outcome == CodeTimedOut(Output(), LIMIT_S)
        assert (await neighbour).outcome == CodeOk(Output("unharmed\n"))
        assert await client.printed("names") == "['kept']\n"

    play(scenario, time_limit_s=LIMIT_S)


def test_cells_that_were_not_kept_run_again(play: Play) -> None:
    """Plain cells make no checkpoint of their own; those before them do."""

    async def scenario(client: Client) -> None:
        await client.printed(MAKE)
        before = await client.printed(LOOK)
        await client.printed("x = 0\nwords = []")
        for number in range(20):
            await client.printed(f"x += {number}\nlast = f'{{x:>5}}'")
        assert isinstance((await client.cell("x = 1 / 0")).outcome, CodeRaised)
        assert isinstance((await client.cell("x = -1\nsum(range(10 ** 12))")).outcome, CodeTimedOut)
        assert await client.printed("x, last") == "(190, '  190')\n"
        assert await client.printed(LOOK) == before
        assert isinstance((await client.cell("exit()")).outcome, CodeDied)
        assert await client.printed("x, last, len(words)") == "(190, '  190', 0)\n"
        assert await client.printed(LOOK) == before

    play(scenario, time_limit_s=LIMIT_S)


def test_a_long_notebook_with_deaths_between_goes_on(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.printed(MAKE + "\nimport os, math\ntotal = 0\ndef add(n):\n    global total\n    total += n")
        before = await client.printed(LOOK)
        for number in range(30):
            await client.printed(f"add({number})" if number % 2 else f"total += {number}")
            if number % 3 == 0:
                assert isinstance((await client.cell("add(1000)\nos._exit(1)")).outcome, CodeDied)
        assert await client.printed("total") == f"{sum(range(30))}\n"
        assert await client.printed(LOOK) == before

    play(scenario)


def test_what_a_dead_cell_started_is_ended_and_what_was_started_before_it_goes_on(play: Play) -> None:
    daemon = (
        "import os, ctypes, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
        "    ctypes.CDLL(None).prctl(15, b'{name}')\n    time.sleep(600)\nos.wait()\n"
    )

    async def scenario(client: Client) -> None:
        await client.printed(daemon.format(name="before"))
        await client.printed(MAKE)
        before = await client.printed(LOOK)
        for end in ("while True: pass", "os._exit(1)"):
            outcome = (await client.cell(f"{daemon.format(name='lost')}{end}")).outcome
            assert isinstance(outcome, CodeTimedOut | CodeDied)
            for pidfd in pidfds_of(client.sandbox, "lost"):  # killed before the answer: they end by themselves
                wait_for_end(pidfd)
            (pidfd,) = pidfds_of(client.sandbox, "before")
            os.close(pidfd)
        assert await client.printed(LOOK) == before

    play(scenario, time_limit_s=LIMIT_S)


def test_a_child_process_belongs_to_the_session_until_it_is_waited_for(play: Play) -> None:
    start = (
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'print(input())'], "
        "stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)"
    )

    async def scenario(client: Client) -> None:
        await client.printed(start)
        await client.printed("answer = child.communicate('hello')[0]")
        assert await client.printed("answer, child.returncode") == "('hello\\n', 0)\n"
        await client.printed(start)
        assert isinstance((await client.cell("while True: pass")).outcome, CodeTimedOut)
        assert await client.printed("child.communicate('again')[0]") == "'again\\n'\n"

    play(scenario, time_limit_s=4.0)


def test_threads_timers_and_the_process_id_stay_from_cell_to_cell(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.printed("import os, signal, threading\npid = os.getpid()\nstop = threading.Event()")
        await client.printed("waiting = threading.Thread(target=stop.wait)\nwaiting.start()")
        await client.printed("import math")
        assert await client.printed("waiting.is_alive(), threading.active_count()") == "(True, 2)\n"
        assert isinstance((await client.cell("os._exit(1)")).outcome, CodeDied)
        assert await client.printed("waiting.is_alive(), threading.active_count()") == "(True, 2)\n"
        await client.printed("stop.set()\nwaiting.join()")
        await client.printed("pid = os.getpid()\nsignal.signal(signal.SIGALRM, signal.default_int_handler)")
        await client.printed("signal.setitimer(signal.ITIMER_REAL, 1000)")
        assert await client.printed("import math\nsignal.getitimer(signal.ITIMER_REAL)[0] > 0") == "True\n"
        assert await client.printed("os.getpid() == pid") == "True\n"

    play(scenario)


def test_a_checkpoint_is_none_of_the_codes_children(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.printed("import os, math")
        for code in ("os.wait()", "os.waitpid(-1, 0)"):
            outcome = (await client.cell(code)).outcome
            assert isinstance(outcome, CodeRaised)
            assert outcome.error == "ChildProcessError: [Errno 10] No child processes"

    play(scenario)


def test_signals_meant_for_a_dead_cell_do_not_reach_the_next(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.printed("import os, signal\nseen = []\nsignal.signal(signal.SIGTERM, lambda *_: seen.append(1))")
        outcome = (await client.cell("os.kill(-1, 15)\nos.kill(os.getpid(), 15)\nprint(seen)\nos._exit(1)")).outcome
        assert outcome == CodeDied(Output("[1]\n"), 1)
        assert await client.printed("seen") == "[]\n"
        assert await client.printed("os.kill(os.getpid(), signal.SIGTERM)\nseen") == "[1]\n"

    play(scenario)


def test_what_a_checkpoint_keeps_is_not_counted_as_the_cells_memory(play: Play) -> None:
    """A cell that rewrites 150 of 256 MiB, and is looked at while it goes on."""

    async def scenario(client: Client) -> None:
        await client.printed("import time\nx = bytearray(b'a') * (150 << 20)")
        rewrites = "until = time.monotonic() + 0.5\nwhile time.monotonic() < until:\n"
        rewrites += "    for n in range(0, len(x), 4096): x[n] = 98"
        await client.printed(rewrites)
        assert await client.printed("x[0], x[-4096]") == "(98, 98)\n"

    play(scenario, memory_mib=256)


def test_more_notebooks_than_have_room_keep_their_names(play: Play) -> None:
    async def scenario(client: Client) -> None:
        for trajectory in range(5):
            await client.printed(f"import math\nx = {trajectory}", trajectory)
        for trajectory in range(5):
            assert isinstance((await client.cell("x = None\nexit()", trajectory)).outcome, CodeDied)
            assert await client.printed("x, math.pi > 3", trajectory) == f"({trajectory}, True)\n"

    play(scenario, live_sessions=2)


def pidfds_of(sandbox: ForkServerSandbox, name: str) -> list[int]:
    """Of the sandbox's processes that call themselves so."""
    found: list[int] = []
    for pid in family(*sandbox.server_pids):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended in between
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(os.pidfd_open(pid))
    return found


def test_where_memory_is_short_idle_notebooks_lose_their_processes_and_no_names(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(client: Client) -> None:
        await asyncio.gather(*[client.cell(f"x = {number}", number) for number in range(20)])
        for kind in (LocalHost, ContainerHost):
            monkeypatch.setattr(kind, "memory_share", lambda host: 0.95)
        monkeypatch.setattr("sandbox.backend._MEMORY_LOOK_S", 0.0)
        before = len(family(*client.sandbox.server_pids))
        await asyncio.gather(*[client.cell("1 + 1", 1000) for _ in range(20)])
        while len(family(*client.sandbox.server_pids)) > before - 20:  # two processes each, which end by themselves
            await client.printed("1 + 1", 1000)
        shown = [await client.printed("x", number) for number in range(20)]
        assert shown == [f"{number}\n" for number in range(20)]

    play(scenario)
