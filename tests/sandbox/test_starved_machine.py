"""Load of other programs does not turn an innocent call into a mistake of the model."""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

import pytest
import structlog

from asterism.bus.messages import CodeOk, CodeTimedOut
from asterism.sandbox.contract import CodeResult, SandboxFailure
from asterism.sandbox.inside.wire.call_wire import STARVED_CAUSE
from asterism.sandbox.inside.wire.frames import Frame
from asterism.sandbox.pool.fork_server_client import ForkServerClient
from tests.sandbox.conftest import Client, StartSandbox, nightly_in_containers

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]

NUM_BUSY = 30
# Innocent calls need a quarter of their time limit: alone, in a thread, in a child, or after a sleep.
BURN = "import time\nwhile time.process_time() < 0.25: sum(range(1000))\nprint('done')"
INNOCENTS = {
    "alone": BURN,
    "thread": f"import threading\nt = threading.Thread(target=exec, args=({BURN!r}, {{}}))\nt.start()\nt.join()",
    "child": f"import os\nif os.fork() == 0:\n    exec({BURN!r})\n    os._exit(0)\nos.wait()",
    "sleep": f"import time\ntime.sleep(0.3)\n{BURN}",
}
ENDLESS = {"loop": "while True: pass", "sleep": "import time; time.sleep(1000)"}


@contextmanager
def busy_machine(num_busy: int) -> Generator[None]:
    """Run processes of a higher priority than a long call, which has the nice value 10."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for _ in range(num_busy)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


async def run_all(client: Client, codes: dict[str, str], copies: int) -> Counter[tuple[str, str]]:
    """Run each code as programs and cells; count the calls by name of the code and type of the end."""
    names = [name for name in codes for _ in range(copies)]
    programs = [client.program(codes[name]) for name in names]
    cells = [client.cell(codes[name], 100 + number) for number, name in enumerate(names)]
    ends = await asyncio.gather(*programs, *cells, return_exceptions=True)
    return Counter((name, describe(end)) for name, end in zip(2 * names, ends, strict=True))


def describe(end: CodeResult | BaseException) -> str:
    if isinstance(end, CodeResult):
        return type(end.outcome).__name__
    return str(end) if isinstance(end, SandboxFailure) else repr(end)


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_on_a_starved_machine_no_innocent_call_is_a_mistake_of_the_model(start_sandbox: StartSandbox) -> None:
    async with start_sandbox(test_limit_s=500, time_limit_s=1.0, fork_servers=2, max_call_extension=4.0) as client:
        assert await run_all(client, INNOCENTS, 1) == {(name, CodeOk.__name__): 2 for name in INNOCENTS}
        with busy_machine(NUM_BUSY), structlog.testing.capture_logs() as logs:
            ends = await run_all(client, INNOCENTS, 4)
        assert {end: count for end, count in ends.items() if end[1] not in (CodeOk.__name__, STARVED_CAUSE)} == {}
        assert ends.total() == 2 * 4 * len(INNOCENTS)
        starved = any(end == STARVED_CAUSE for _, end in ends)
        assert sum(entry["event"] == "sandbox.starved" for entry in logs) == (1 if starved else 0)
        assert await run_all(client, INNOCENTS, 1) == {(name, CodeOk.__name__): 2 for name in INNOCENTS}


@nightly_in_containers
async def test_endless_code_next_to_endless_code_is_a_mistake_of_the_model(start_sandbox: StartSandbox) -> None:
    """Load of other calls in the sandbox is not load from outside."""
    async with start_sandbox(time_limit_s=0.3, fork_servers=2) as client:
        ends = await run_all(client, ENDLESS, 2)
    assert ends == {(name, CodeTimedOut.__name__): 4 for name in ENDLESS}


@nightly_in_containers
@pytest.mark.parametrize("num_starved", [1, 2])
async def test_a_starved_call_runs_again_once_and_then_fails(
    start_sandbox: StartSandbox, num_starved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = ForkServerClient.call, Counter[str]()

    async def call(self: ForkServerClient, frame: Frame) -> Frame:
        answer = await real(self, frame)
        left[frame["op"]] += 1
        starved = frame["op"] in ("run", "cell") and left[frame["op"]] <= num_starved
        return {**answer, "kind": "failed", "details": [STARVED_CAUSE], "cells": 0} if starved else answer

    async with start_sandbox() as client:
        monkeypatch.setattr(ForkServerClient, "call", call)
        with structlog.testing.capture_logs() as logs:
            ends = await asyncio.gather(client.program("1"), client.cell("1"), return_exceptions=True)
        monkeypatch.undo()
        assert [describe(end) for end in ends] == [CodeOk.__name__ if num_starved == 1 else STARVED_CAUSE] * 2
        assert await client.printed("2") == "2\n"
    assert [entry["cause"] for entry in logs if entry["event"] == "sandbox.starved"] == [STARVED_CAUSE]
