"""The handle of a real sandbox for tests of rewards."""

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from asterism.bus.messages import CodeOk, CodeRequested
from asterism.configs.schema.machines import SandboxConfig
from asterism.sandbox.contract import Sandbox
from asterism.sandbox.select_backend import make_sandbox
from asterism.tasks.contract import SandboxResult


class SandboxPrograms:
    """A sandbox handle with another trajectory for each program, so that programs overlap."""

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
async def open_sandbox() -> AsyncGenerator[SandboxPrograms]:
    sandbox = make_sandbox(SandboxConfig(backend="process", time_limit_s=20.0))
    await sandbox.start()
    try:
        yield SandboxPrograms(sandbox)
    finally:
        await sandbox.close()
