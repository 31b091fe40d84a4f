"""`asterism sandbox shell`: runs notebook cells and prints what a model would read."""

from __future__ import annotations

import asyncio
import codeop
import secrets
import sys
import threading
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console

from bus.messages import CodeRequested
from policies.dialogue.tool_results import format_result
from sandbox.contract import CodeResult, SandboxFailure

_MAX_SHOWN_CHARACTERS = 20_000


class ShellSandbox(Protocol):
    async def run(self, call: CodeRequested) -> CodeResult: ...

    async def end_notebook(self, trajectory_id: int) -> None: ...


async def run_shell(sandbox: ShellSandbox, console: Console) -> None:
    """Runs cells until end of file. A cell is complete when Python's own prompt would run it."""
    notebook = secrets.randbits(62)  # other clients may use the same sandbox
    cells = _read_cells(interactive=sys.stdin.isatty())
    call = 0
    while (cell := await _await_next_cell(cells)) is not None:
        try:
            result = await sandbox.run(CodeRequested(notebook, call, "jupyter_code", cell, ""))
        except SandboxFailure as error:
            console.print(f"infrastructure: {error}", style="bold red", markup=False)
        else:
            console.out(format_result(result.outcome, _MAX_SHOWN_CHARACTERS), highlight=False)
            console.print(f"({1000 * result.duration_s:.1f} ms)", style="dim", highlight=False)
        call += 1
    await sandbox.end_notebook(notebook)


async def _await_next_cell(cells: Iterator[str]) -> str | None:
    """Reads the next cell in a daemon thread, so that ^C ends the shell during `input`."""
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
    """Code that does not compile is complete too: the sandbox reports its error."""
    try:
        return codeop.compile_command(cell, symbol="single") is not None
    except (SyntaxError, ValueError, OverflowError):
        return True
