"""A sandbox handle that runs programs of reward functions in a real sandbox."""

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from asterism.bus.messages import CodeOk, CodeRequested
from asterism.sandbox.contract import Sandbox
from asterism.tasks.contract import SandboxResult
from tests.sandbox.conftest import open_sandbox


class SandboxPrograms:
    """A sandbox handle that uses a new trajectory for each program, so that programs run concurrently."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox, self._numbers = sandbox, itertools.count()

    async def run(self, code: str, stdin: str = "", files: dict[str, str] | None = None) -> SandboxResult:
        call = CodeRequested(next(self._numbers), 0, "python_code_with_standard_io", code, stdin)
        outcome: Any = (await self._sandbox.run(call)).outcome
        if isinstance(outcome, CodeOk):
            return SandboxResult(outcome.output.stdout, outcome.output.stderr, "")
        return SandboxResult("", "", type(outcome).__name__)

    def run_blocking(self, code: str, stdin: str = "", files: dict[str, str] | None = None) -> SandboxResult:
        raise NotImplementedError


@asynccontextmanager
async def open_programs() -> AsyncGenerator[SandboxPrograms]:
    async with open_sandbox("process", None, time_limit_s=20.0) as client:
        yield SandboxPrograms(client.sandbox)
