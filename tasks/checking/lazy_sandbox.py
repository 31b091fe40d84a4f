"""Starts a sandbox at its first call, because few tasks run programs."""

import asyncio
from collections.abc import Sequence
from typing import NoReturn

from asterism.bus.messages import AnswerSubmitted, CodeRequested
from asterism.sandbox.contract import CodeResult, Grade, Isolation, Sandbox


class LazySandbox:
    """A sandbox (asterism.sandbox.contract.Sandbox) that starts at its first call."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._starting: asyncio.Task[Isolation] | None = None

    async def start(self) -> Isolation:
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = asyncio.create_task(self._sandbox.start())
        return await asyncio.shield(self._starting)

    async def run(self, call: CodeRequested) -> CodeResult:
        await self.start()
        return await self._sandbox.run(call)

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        await self.start()
        return await self._sandbox.grade(submission)

    async def wait_until_broken(self) -> NoReturn:
        await self.start()
        await self._sandbox.wait_until_broken()

    def restore_notebook(self, trajectory_id: int, cells: Sequence[CodeRequested]) -> None:
        self._sandbox.restore_notebook(trajectory_id, cells)

    async def end_notebook(self, trajectory_id: int) -> None:
        if self._starting is not None:
            await self._sandbox.end_notebook(trajectory_id)

    async def close(self) -> None:
        if self._starting is not None:
            await asyncio.wait([self._starting])
            await self._sandbox.close()
