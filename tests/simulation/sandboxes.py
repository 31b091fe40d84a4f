"""A sandbox under a virtual clock. The output of a cell is the cell's number in its notebook."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import NoReturn

from asterism.bus.messages import AnswerSubmitted, CodeOk, CodeRaised, CodeRequested, CodeTimedOut, Output
from asterism.sandbox.contract import CodeResult, Grade, Isolation, SandboxFailure


class NotebookSandbox:
    """A fake asterism.sandbox.contract.Sandbox. Calls and gradings fail with the probability `failure_rate`."""

    def __init__(self, random: Random, failure_rate: float) -> None:
        self._random, self._failure_rate = random, failure_rate
        self._notebooks: dict[int, list[int]] = {}
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def start(self) -> Isolation:
        return Isolation("simulated", (), False, ())

    async def run(self, call: CodeRequested) -> CodeResult:
        async with self._turns[call.trajectory_id]:
            return await self._cell(call)

    async def _cell(self, call: CodeRequested) -> CodeResult:
        draw = self._random.random
        await asyncio.sleep(self._random.choice([0.01, 0.1, 4.0]))
        if draw() < self._failure_rate:
            raise SandboxFailure("gone")
        cells = self._notebooks.setdefault(call.trajectory_id, [])
        if draw() < 0.1:
            return CodeResult(CodeTimedOut(Output(), 4.0), 4.0)
        cells.append(call.call)
        output = Output(f"cell {len(cells)}")
        return CodeResult(CodeOk(output) if draw() < 0.7 else CodeRaised(output, "E", "E"), 0.1)

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        await asyncio.sleep(self._random.choice([0.01, 0.1, 4.0]))
        if self._random.random() < self._failure_rate:
            raise SandboxFailure("gone")
        return Grade(self._random.random() < 0.5, 0.01)

    async def wait_until_broken(self) -> NoReturn:
        while True:
            await asyncio.Event().wait()

    def restore_notebook(self, trajectory_id: int, cells: Sequence[CodeRequested]) -> None:
        assert trajectory_id not in self._notebooks
        self._notebooks[trajectory_id] = [cell.call for cell in cells]

    async def end_notebook(self, trajectory_id: int) -> None:
        self._notebooks.pop(trajectory_id, None)

    async def close(self) -> None:
        pass
