"""`asterism sandbox shell`: a notebook in the sandbox, cell by cell, with the text that a model would read."""

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
from policies.tool_text import result_text
from sandbox.contract import CodeResult, SandboxFailure

_SHOWN_CHARACTERS = 20_000


class Notebooks(Protocol):
    async def run(self, call: CodeRequested) -> CodeResult: ...

    async def end_session(self, trajectory_id: int) -> None: ...


async def converse(sandbox: Notebooks, console: Console) -> None:
    """Reads cells until end of file. A cell is complete when Python's own prompt would run it."""
    notebook = secrets.randbits(62)  # others may use the same sandbox
    cells = _cells(interactive=sys.stdin.isatty())
    call = 0
    while (cell := await _next(cells)) is not None:
        try:
            result = await sandbox.run(CodeRequested(notebook, call, "jupyter_code", cell, ""))
        except SandboxFailure as error:
            console.print(f"infrastructure: {error}", style="bold red", markup=False)
        else:
            console.out(result_text(result.outcome, _SHOWN_CHARACTERS), highlight=False)
            console.print(f"({1000 * result.duration_s:.1f} ms)", style="dim", highlight=False)
        call += 1
    await sandbox.end_session(notebook)


async def _next(cells: Iterator[str]) -> str | None:
    """In a thread that nobody waits for: ^C ends the shell while it stands in `input`."""
    loop = asyncio.get_running_loop()
    cell: asyncio.Future[str | None] = loop.create_future()
    threading.Thread(target=lambda: loop.call_soon_threadsafe(cell.set_result, next(cells, None)), daemon=True).start()
    return await cell


def _cells(*, interactive: bool) -> Iterator[str]:
    lines: list[str] = []
    while (line := _line(">>> " if not lines else "... ", interactive=interactive)) is not None:
        lines.append(line)
        cell = "\n".join(lines)
        if not cell.strip():
            lines = []
        elif _complete(cell):
            yield cell
            lines = []
    if lines:
        yield "\n".join(lines)


def _line(prompt: str, *, interactive: bool) -> str | None:
    try:
        return input(prompt if interactive else "")
    except EOFError:
        return None


def _complete(cell: str) -> bool:
    """What does not compile is complete too: the sandbox says what is wrong with it."""
    try:
        return codeop.compile_command(cell, symbol="single") is not None
    except (SyntaxError, ValueError, OverflowError):
        return True
