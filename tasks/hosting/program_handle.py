"""The handle with which a task's code runs programs in the sandbox of its executor."""

import asyncio
import threading
from typing import Protocol

from asterism.tasks.contract import Fault, SandboxResult
from asterism.tasks.hosting.wire import ProgramEnded, RunProgram


class SendMessage(Protocol):
    def __call__(self, message: RunProgram) -> None: ...


class ProgramQueue:
    """A queue of running programs, bounded by the number of waiting calls."""

    def __init__(self, send: SendMessage) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[ProgramEnded]] = {}
        self._num_programs = 0
        self.loop, self.thread = asyncio.get_running_loop(), threading.current_thread()

    async def run(self, trajectory_id: int, code: str, stdin: str) -> SandboxResult:
        """Run a program and return its result. Raises Fault."""
        self._num_programs += 1
        number = self._num_programs
        waiting = self._waiting[number] = self.loop.create_future()
        try:
            self._send(RunProgram(number, trajectory_id, code, stdin))
            ended = await waiting
        finally:
            del self._waiting[number]
        if ended.fault:
            raise Fault(f"sandbox: {ended.fault}")
        return SandboxResult(ended.stdout, ended.stderr, ended.error)

    def on_ended(self, ended: ProgramEnded) -> None:
        waiting = self._waiting.get(ended.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(ended)


class ProgramHandle:
    """The sandbox handle of one trajectory (implements asterism.tasks.contract.SandboxHandle)."""

    def __init__(self, queue: ProgramQueue, trajectory_id: int) -> None:
        self._queue, self._trajectory_id = queue, trajectory_id

    async def run(self, code: str, stdin: str = "", files: dict[str, str] | None = None) -> SandboxResult:
        return await self._queue.run(self._trajectory_id, add_files(code, files or {}), stdin)

    def run_blocking(self, code: str, stdin: str = "", files: dict[str, str] | None = None) -> SandboxResult:
        if threading.current_thread() is self._queue.thread:  # a deadlock: the event loop would wait for itself
            raise RuntimeError("run_blocking is for sync functions; an async function awaits sandbox.run(...)")
        running = asyncio.run_coroutine_threadsafe(self.run(code, stdin, files), self._queue.loop)
        return running.result()


def add_files(code: str, files: dict[str, str]) -> str:
    """Return a program that writes the files and then runs `code` with the line numbers of `code`."""
    if not files:
        return code
    return (
        "import pathlib\n"
        f"for name, text in {files!r}.items():\n"
        "    path = pathlib.Path(name)\n"
        "    path.parent.mkdir(parents=True, exist_ok=True)\n"
        "    path.write_text(text, encoding='utf-8')\n"
        f"exec(compile({code!r}, '<program>', 'exec'), {{'__name__': '__main__'}})\n"
    )
