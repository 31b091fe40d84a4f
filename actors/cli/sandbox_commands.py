"""`asterism sandbox bench | shell | doctor` uses the code sandbox without a run."""

import asyncio
import codeop
import secrets
import sys
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import structlog
import uvloop
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from asterism.actors.cli.console import escape_controls
from asterism.actors.sandbox_service.sandbox_client import SandboxClient
from asterism.analysis.summary import read_isolation
from asterism.bus.addresses import EXECUTOR
from asterism.bus.messages import CodeRequested
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.dialogue.tool_results import format_result
from asterism.sandbox.contract import CodeResult, Isolation, Sandbox, SandboxFailure
from asterism.sandbox.escape_test import EscapeFinding, run_escape_attempts
from asterism.sandbox.fork_server_sandbox import ForkServerSandbox
from asterism.sandbox.isolation import format_isolation
from asterism.sandbox.load_test import (
    NUMPY,
    PRINT,
    SYMPY,
    LoadFigures,
    make_program_probes,
    measure_programs,
    run_burst,
)
from asterism.sandbox.select_backend import make_sandbox

_BENCHMARK_CALLS = (PRINT, NUMPY, SYMPY)
_IN_FLIGHT = (1, 16, 256)


def suppress_logs() -> None:
    """Hide the sandbox's log entries below the level "error"."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))


def make_sandbox_of_run(run: RunConfig, folder: RunFolder, purpose: str) -> Sandbox:
    """Make a sandbox for calls and gradings of a finished run, with the backend that the run chose for `auto`."""
    config = run.sandbox
    if config.backend == "auto" and (before := read_isolation(folder, EXECUTOR)) is not None:
        config = replace(config, backend=before["backend"])
    return make_sandbox(config, run.seed, f"{run.name}-{purpose}", run.acceptance)


def load_config_or_defaults(config: Path | None, overrides: Sequence[str]) -> RunConfig:
    """Load the configuration from a file, or the defaults without one. Raises ConfigError."""
    return load_run(config, overrides if config else ["name=sandbox", *overrides])


# ---------------------------------------------------------------- shell, bench


@asynccontextmanager
async def _open_sandbox(run: RunConfig, at: Path | None) -> AsyncGenerator[SandboxClient | ForkServerSandbox]:
    """Connect to the sandbox served in the folder `at`, or start one."""
    if at is not None:
        async with SandboxClient(at) as client:
            yield client
        return
    sandbox = make_sandbox(run.sandbox, run.seed, run.name, run.acceptance)
    await sandbox.start()
    try:
        yield sandbox
    finally:
        await sandbox.close()


def open_shell(run: RunConfig, at: Path | None, console: Console) -> None:
    """Open a shell in the sandbox. Raises SandboxFailure if no sandbox is available."""

    async def open_and_run() -> None:
        async with _open_sandbox(run, at) as sandbox:
            await run_shell(sandbox, console)

    uvloop.run(open_and_run())


def run_benchmark(run: RunConfig, at: Path | None, seconds: float, console: Console) -> dict[str, float]:
    """Run load for about `seconds` and return the figures; other work on this machine lowers them."""
    return uvloop.run(_run_benchmark(run, at, seconds / (len(_BENCHMARK_CALLS) * len(_IN_FLIGHT)), console))


async def _run_benchmark(
    run: RunConfig, at: Path | None, seconds_per_case: float, console: Console
) -> dict[str, float]:
    table = Table("call", "in flight", "calls/s", "p50, ms", "p99, ms", "failed", box=None)
    figures: dict[str, float] = {}
    async with _open_sandbox(run, at) as sandbox:
        for kind in _BENCHMARK_CALLS:
            # The warm-up starts the fork servers, which start with the first call.
            await run_burst(sandbox, list(make_program_probes(kind, range(8))))
            for in_flight in _IN_FLIGHT:
                seen = await measure_programs(sandbox, kind, in_flight, seconds_per_case)
                table.add_row(kind, str(in_flight), *_format_cells(seen))
                name = f"{kind}_{in_flight}"
                figures |= {f"{name}_per_s": seen.per_s, f"{name}_p50_ms": seen.p50_ms, f"{name}_p99_ms": seen.p99_ms}
    console.print(table)
    return {name: round(value, 3) for name, value in figures.items()}


def _format_cells(figures: LoadFigures) -> tuple[str, str, str, str]:
    failed = ", ".join(f"{cause}: {number}" for cause, number in figures.failures.items())
    return f"{figures.per_s:.0f}", f"{figures.p50_ms:.1f}", f"{figures.p99_ms:.1f}", failed or "0"


# ---------------------------------------------------------------- doctor


def examine_sandbox(run: RunConfig, console: Console) -> bool:
    """Return whether the sandbox contained every escape attempt. Raises SandboxFailure."""
    isolation, findings = uvloop.run(_examine(run))
    console.print(f"backend: {format_isolation(isolation)}", highlight=False, soft_wrap=True)
    for sentence in isolation.missing:
        console.print(f"[yellow]missing[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    table = Table("", "attempt", "result", box=None)
    for finding in findings:
        table.add_row(
            "[green]contained[/]" if finding.contained else "[bold red]ESCAPED[/]", finding.name, escape(finding.detail)
        )
    console.print(table)
    return all(finding.contained for finding in findings)


async def _examine(run: RunConfig) -> tuple[Isolation, list[EscapeFinding]]:
    sandbox = make_sandbox(run.sandbox, run.seed, run.name, run.acceptance)
    isolation = await sandbox.start()
    try:
        return isolation, await run_escape_attempts(sandbox)
    finally:
        await sandbox.close()


# ---------------------------------------------------------------- the cells of the shell

_MAX_SHOWN_CHARACTERS = 20_000


class ShellSandbox(Protocol):
    async def run(self, call: CodeRequested) -> CodeResult: ...

    async def end_notebook(self, trajectory_id: int) -> None: ...


async def run_shell(sandbox: ShellSandbox, console: Console) -> None:
    """Run cells until end of file. A cell is complete when Python's own prompt would run it."""
    notebook = secrets.randbits(62)  # other clients may use the same sandbox
    cells = _read_cells(interactive=sys.stdin.isatty())
    call = 0
    while (cell := await _await_next_cell(cells)) is not None:
        try:
            result = await sandbox.run(CodeRequested(notebook, call, "jupyter_code", cell, ""))
        except SandboxFailure as error:
            console.print(escape_controls(f"infrastructure: {error}"), style="bold red", markup=False)
        else:
            console.out(escape_controls(format_result(result.outcome, _MAX_SHOWN_CHARACTERS)), highlight=False)
            console.print(f"({1000 * result.duration_s:.1f} ms)", style="dim", highlight=False)
        call += 1
    await sandbox.end_notebook(notebook)


async def _await_next_cell(cells: Iterator[str]) -> str | None:
    """Read the next cell in a daemon thread, so that ^C ends the shell during `input`."""
    loop = asyncio.get_running_loop()
    cell: asyncio.Future[str | None] = loop.create_future()
    threading.Thread(target=lambda: loop.call_soon_threadsafe(cell.set_result, next(cells, None)), daemon=True).start()
    return await cell


def _read_cells(*, interactive: bool) -> Iterator[str]:
    lines: list[str] = []
    while (line := _read_line(">>> " if not lines else "... ", interactive=interactive)) is not None:
        lines.append(line)
        cell = "\n".join(lines)
        if not cell.strip():
            lines = []
        elif _is_complete(cell):
            yield cell
            lines = []
    if lines:
        yield "\n".join(lines)


def _read_line(prompt: str, *, interactive: bool) -> str | None:
    try:
        return input(prompt if interactive else "")
    except EOFError:
        return None


def _is_complete(cell: str) -> bool:
    """Return whether Python would run the cell; broken code counts too: the sandbox reports its error."""
    try:
        return codeop.compile_command(cell, symbol="single") is not None
    except (SyntaxError, ValueError, OverflowError):
        return True
