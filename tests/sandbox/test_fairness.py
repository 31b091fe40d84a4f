"""The resources that a call or an idle notebook takes from other calls are bounded. The tests count outcomes."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asterism.bus.messages import CodeOutcome, CodeTimedOut
from asterism.configs.schema.machines import SandboxConfig
from asterism.sandbox.contract import CodeResult
from asterism.sandbox.inside.wire.command import build_python_command
from tests.processes import family
from tests.sandbox.conftest import Client, StartSandbox, get_text, list_call_cgroups, nightly_in_containers
from tests.sandbox.greedy import GREEDY, PREAMBLE, REPRESENTATIVES

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]
REFUSALS = (
    "no process for a call: Too many open files",
    "no process for a call: Resource temporarily unavailable",
    "a notebook could not fork",
    "a call could not be isolated",
)


@pytest.fixture
def start_scarce(start_sandbox: StartSandbox, monkeypatch: pytest.MonkeyPatch) -> StartSandbox:
    """Start a fork server of this machine with few descriptors, or a container with few processes."""
    monkeypatch.setattr(
        "asterism.configs.schema.machines.require", lambda *_: None
    )  # without this patch, SandboxConfig refuses so few processes
    monkeypatch.setattr(
        "asterism.sandbox.hosts.local_host.build_python_command",
        lambda *arguments: ["/bin/sh", "-c", 'ulimit -n 80; exec "$@"', "sh", *build_python_command(*arguments)],
    )
    return partial(start_sandbox, container_processes=40, time_limit_s=20.0)


_SCARCE_WATCHES = """
import errno, os, select
class Epoll:
    def __init__(self, make=select.epoll):
        self.epoll, self.left = make(), 8
        self.poll, self.modify, self.close = self.epoll.poll, self.epoll.modify, self.epoll.close
    def register(self, *arguments):
        if not self.left: raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.epoll.register(*arguments)
        self.left -= 1
    def unregister(self, fd):
        self.epoll.unregister(fd)
        self.left += 1
select.epoll = Epoll
"""


@pytest.mark.parametrize("start_sandbox", ["process"], indirect=True)
async def test_a_refused_epoll_watch_fails_only_its_call(
    start_sandbox: StartSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*arguments: Any) -> list[str]:
        *options, script, settings, fd = build_python_command(*arguments)
        return [*options, _SCARCE_WATCHES + script, settings, fd]

    monkeypatch.setattr("asterism.sandbox.hosts.local_host.build_python_command", build)
    async with start_sandbox(time_limit_s=20.0) as client:
        assert get_texts([await client.program("print(1)")]) == ["1\n"]
        servers = client.sandbox.server_pids
        sleeps = "import time; time.sleep(0.5); print('slept')"
        calls = [client.cell(sleeps, number) if number % 2 else client.program(sleeps) for number in range(12)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        failures = {str(result) for result in results if isinstance(result, BaseException)}
        assert failures <= {
            "no process for a call: No space left on device",
            "the fork server could not serve a call: No space left on device",
        }
        assert len(failures) > 0
        await client.end_all()
        assert get_texts([await client.program("print(2)") for _ in range(4)]) == ["2\n"] * 4
        assert client.sandbox.server_pids == servers


def get_texts(results: list[CodeResult]) -> list[str | CodeOutcome]:
    return [get_text(result) for result in results]


async def test_a_refused_fork_fails_only_its_call(start_scarce: StartSandbox) -> None:
    async with start_scarce() as client:
        assert get_texts([await client.program("print(1)")]) == ["1\n"]
        servers = client.sandbox.server_pids
        sleeps = "import time; time.sleep(2); print('slept')"
        calls = [client.cell(sleeps, number) if number % 2 else client.program(sleeps) for number in range(40)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        assert {str(failure) for failure in failures} <= set(REFUSALS)
        assert 0 < len(failures) < 40
        texts = get_texts([result for result in results if isinstance(result, CodeResult)])
        assert texts == ["slept\n"] * (40 - len(failures))
        assert get_texts([await client.program("print(2)") for _ in range(8)]) == ["2\n"] * 8
        assert client.sandbox.server_pids == servers


@nightly_in_containers
async def test_idle_notebooks_are_evicted_for_calls_that_cannot_start(start_scarce: StartSandbox) -> None:
    async with start_scarce() as client:
        for trajectory in range(20):
            assert await client.printed(f"import math; x = {trajectory}", trajectory) == ""
        assert get_texts([await client.program("print(2)") for _ in range(3)]) == ["2\n"] * 3
        for trajectory in range(20):
            assert await client.printed("x", trajectory) == f"{trajectory}\n"


def test_the_process_limit_of_a_container_covers_all_notebooks() -> None:
    SandboxConfig(max_live_notebooks=100, max_processes=8, container_processes=2024)
    with pytest.raises(ValueError, match=r"container_processes must be .*max_live_notebooks.*max_processes.* = 2024"):
        SandboxConfig(max_live_notebooks=100, max_processes=8, container_processes=2023)


def count_oom_kills() -> int:
    return int(Path("/proc/vmstat").read_text().split("oom_kill ")[1].split()[0])


@pytest.mark.docker
@pytest.mark.parametrize("start_sandbox", ["docker"], indirect=True)
async def test_a_call_that_the_kernel_kills_below_its_limit_runs_again(start_sandbox: StartSandbox) -> None:
    limits = {"memory_mib": 64, "file_mib": 60, "container_memory_mib": 576, "notebook_memory_share": 1.0}
    async with start_sandbox(time_limit_s=20.0, max_live_notebooks=8, **limits) as client:
        fill = "open('file', 'wb').write(bytes(50 << 20)) and None"
        results = await asyncio.gather(*[client.cell(fill, trajectory) for trajectory in range(8)])
        assert get_texts(results) == [""] * 8
        before = count_oom_kills()
        programs = [
            client.program("import time\nx = b'x' * (47 << 20)\ntime.sleep(0.3)\nprint(len(x))") for _ in range(4)
        ]
        assert get_texts(await asyncio.gather(*programs)) == [f"{47 << 20}\n"] * 4
        assert count_oom_kills() > before


SCALED_LIMITS: dict[str, Any] = {  # a quarter of the default limits
    "time_limit_s": 1.0,
    "memory_mib": 128,
    "file_mib": 4,
    "max_live_notebooks": 128,
    "container_memory_mib": 2048,
    "container_processes": 4096,
}
_ZYGOTE_MIB = 12  # pages that all calls share with the fork server
INNOCENT = "import time\nx = b'x' * (47 << 20)\nwhile time.process_time() < 0.25: pass\nprint(len(x))"


class MemoryWatch(threading.Thread):
    """A thread that samples the memory of each call's cgroup, or without cgroups, of the processes with its name.

    A sum over processes is too large while the kernel kills one process and another one grows.
    """

    def __init__(self, servers: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._servers = servers
        self._done = threading.Event()
        self.most_mib: dict[str, float] = {}

    def __enter__(self) -> "MemoryWatch":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        while not self._done.wait(0.05):
            cgroups = list_call_cgroups(self._servers)
            held = {str(cgroup): mib for cgroup in cgroups if (mib := read_used_mib(cgroup)) is not None}
            for pid in () if cgroups else family(*self._servers):
                with contextlib.suppress(OSError, IndexError):
                    name = read_name(pid)
                    if name.startswith("greedy"):
                        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                        kib = sum(int(text.split(f"\n{kind}:")[1].split()[0]) for kind in ("Pss_Anon", "Pss_Shmem"))
                        held[name] = held.get(name, 0.0) + kib / 1024
            for name, mib in held.items():
                self.most_mib[name] = max(mib, self.most_mib.get(name, 0.0))


def read_used_mib(cgroup: Path) -> float | None:
    for name in ("memory.usage_in_bytes", "memory.current"):
        with contextlib.suppress(OSError):
            return int((cgroup / name).read_text()) / (1 << 20)
    return None


async def meet_greedy(client: Client, codes: Sequence[str]) -> None:
    """Run the codes as programs and cells, next to four innocent programs.

    Repeat a timeout twice: other programs of the machine hardly cause three in a row.
    """
    for _ in range(3):
        texts = await _run_next_to_greedy(client, codes)
        if not any(isinstance(text, CodeTimedOut) for text in texts):
            break
    assert texts == [f"{47 << 20}\n"] * 4


async def _run_next_to_greedy(client: Client, codes: Sequence[str]) -> list[str | CodeOutcome]:
    with MemoryWatch(client.sandbox.server_pids) as watch:
        calls: list[Coroutine[Any, Any, CodeResult]] = []
        for number, code in enumerate(codes):
            calls.append(client.program(PREAMBLE.replace("{name}", f"greedy-p{number}") + code))
            calls.append(client.cell(PREAMBLE.replace("{name}", f"greedy-n{number}") + code, 1000 + number))
        greedy = [asyncio.create_task(call) for call in calls]
        await client.program("print()")  # when this program ends, the greedy calls have started
        innocents = await asyncio.gather(*[client.program(INNOCENT) for _ in range(4)])
        await asyncio.gather(*greedy)  # raises SandboxFailure if a greedy call fails
        await client.end_all()
    most_mib = 1.25 * SCALED_LIMITS["memory_mib"] + _ZYGOTE_MIB
    assert {name: mib for name, mib in watch.most_mib.items() if mib > most_mib} == {}
    while any(read_name(pid).startswith("greedy") for pid in family(*client.sandbox.server_pids)):
        await client.program("print()")
    return get_texts(innocents)


def read_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


async def test_innocent_programs_succeed_next_to_greedy_calls(start_sandbox: StartSandbox) -> None:
    async with start_sandbox(**SCALED_LIMITS) as client:
        await meet_greedy(client, list(REPRESENTATIVES.values()))


@pytest.mark.nightly
@pytest.mark.parametrize("name", GREEDY)
async def test_innocent_programs_succeed_next_to_one_greedy_call(start_sandbox: StartSandbox, name: str) -> None:
    async with start_sandbox(**SCALED_LIMITS) as client:
        await meet_greedy(client, [GREEDY[name]])
