"""`asterism sandbox serve | bench | shell | doctor`: the code environment by itself, without a run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import count, product
from pathlib import Path

import structlog
import uvloop
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from actors.executor import Executor
from actors.sandbox_client import SERVED, SandboxClient, is_served
from actors.sandbox_shell import converse
from bus.lanes import LANES
from bus.messages import Shutdown
from bus.zeromq import socket_of, zmq_bus
from configs.errors import UnusableInput
from configs.load import load_run
from configs.schema import Run
from sandbox.backend import ForkServerSandbox
from sandbox.choice import sandbox_of
from sandbox.contract import Isolation
from sandbox.isolation import in_words
from sandbox.load import NUMPY, PRINT, SYMPY, Figures, closed_loop, for_seconds, programs
from sandbox.trial import Finding, try_out

_BENCHED = (PRINT, NUMPY, SYMPY)
_IN_FLIGHT = (1, 16, 256)


def quiet() -> None:
    """What the sandbox logs is for runs; here only what is wrong is shown."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))


def settings(config: Path | None, overrides: Sequence[str]) -> Run:
    """Of a configuration's file, or the defaults. Raises ConfigError."""
    return load_run(config, overrides if config else ["name=sandbox", *overrides])


# ---------------------------------------------------------------- serve


def serve_sandbox(run: Run, folder: Path, console: Console) -> None:
    """Until ^C or SIGTERM. Raises UnusableInput if the folder cannot hold sockets, or one is served there already."""
    folder.mkdir(parents=True, exist_ok=True)
    if len(str(folder.resolve())) >= 85:
        raise UnusableInput(f"--at {folder}: the path is too long for a socket; take one below 85 characters")
    if is_served(folder):
        raise UnusableInput(f"--at {folder}: a sandbox is served there already")
    uvloop.run(_serve(run, folder, console))


async def _serve(run: Run, folder: Path, console: Console) -> None:
    sandbox = sandbox_of(run.sandbox, run.seed, run.name)
    bus = zmq_bus(SERVED, folder, run.bus.queue_messages)
    stopper = zmq_bus("stopper", folder, run.bus.queue_messages)

    def stop() -> None:
        asyncio.get_running_loop().create_task(stopper.send(SERVED, Shutdown()))

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    console.print(f"serving in {folder}; ^C ends it", markup=False, soft_wrap=True)
    try:
        await Executor(bus, sandbox).run()
    finally:
        await bus.close()
        await stopper.close()
        for name, lane in product((SERVED, "stopper"), LANES):
            socket_of(folder, name, lane).unlink(missing_ok=True)


# ---------------------------------------------------------------- shell, bench


@asynccontextmanager
async def _open(run: Run, at: Path | None) -> AsyncGenerator[SandboxClient | ForkServerSandbox]:
    """A sandbox of its own, or the one that is served in the folder."""
    if at is not None:
        async with SandboxClient(at) as client:
            yield client
        return
    sandbox = sandbox_of(run.sandbox, run.seed, run.name)
    await sandbox.start()
    try:
        yield sandbox
    finally:
        await sandbox.close()


def open_shell(run: Run, at: Path | None, console: Console) -> None:
    """Raises SandboxFailure if there is no sandbox to be had."""

    async def talk() -> None:
        async with _open(run, at) as sandbox:
            await converse(sandbox, console)

    uvloop.run(talk())


def bench(run: Run, at: Path | None, seconds: float, console: Console) -> dict[str, float]:
    """Puts load on for about so many seconds; the figures are this machine's, its other work included."""
    return uvloop.run(_bench(run, at, seconds / (len(_BENCHED) * len(_IN_FLIGHT)), console))


async def _bench(run: Run, at: Path | None, each_s: float, console: Console) -> dict[str, float]:
    table = Table("call", "in flight", "calls/s", "p50, ms", "p99, ms", "failed", box=None)
    figures: dict[str, float] = {}
    async with _open(run, at) as sandbox:
        for kind in _BENCHED:
            await closed_loop(sandbox, programs(kind, range(8)), 8)  # servers start with the first call
            for in_flight in _IN_FLIGHT:
                tally = await closed_loop(sandbox, for_seconds(programs(kind, count()), each_s), in_flight)
                seen = tally.figures()
                table.add_row(kind, str(in_flight), *_cells(seen))
                name = f"{kind}_{in_flight}"
                figures |= {f"{name}_per_s": seen.per_s, f"{name}_p50_ms": seen.p50_ms, f"{name}_p99_ms": seen.p99_ms}
    console.print(table)
    return {name: round(value, 3) for name, value in figures.items()}


def _cells(seen: Figures) -> tuple[str, str, str, str]:
    failed = ", ".join(f"{cause}: {number}" for cause, number in seen.failures.items())
    return f"{seen.per_s:.0f}", f"{seen.p50_ms:.1f}", f"{seen.p99_ms:.1f}", failed or "0"


# ---------------------------------------------------------------- doctor


def examine_sandbox(run: Run, console: Console) -> bool:
    """Whether everything held. Raises SandboxFailure if there is no sandbox to be had."""
    isolation, findings = uvloop.run(_examine(run))
    console.print(f"backend: {in_words(isolation)}", highlight=False, soft_wrap=True)
    for sentence in isolation.missing:
        console.print(f"[yellow]missing[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    table = Table("", "executed code tries to", "what came of it", box=None)
    for finding in findings:
        table.add_row(
            "[green]held[/]" if finding.held else "[bold red]through[/]", finding.name, escape(finding.detail)
        )
    console.print(table)
    return all(finding.held for finding in findings)


async def _examine(run: Run) -> tuple[Isolation, list[Finding]]:
    sandbox = sandbox_of(run.sandbox, run.seed, run.name)
    isolation = await sandbox.start()
    try:
        return isolation, await try_out(sandbox)
    finally:
        await sandbox.close()
