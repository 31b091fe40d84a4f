"""A sandbox that starts at its first call."""

from typing import Any

import pytest

from asterism.bus.messages import CodeRequested
from asterism.sandbox.contract import CodeResult, Isolation, SandboxFailure
from asterism.tasks.checking.lazy_sandbox import LazySandbox
from tests.actors.cli.chat.scripted_chats import ScriptedSandbox


class LateSandbox(ScriptedSandbox):
    """A sandbox whose first start fails."""

    num_starts = 0

    async def start(self) -> Isolation:
        self.num_starts += 1
        if self.num_starts == 1:
            raise SandboxFailure("no Docker")
        return Isolation("late", (), False, ())


async def test_a_failed_start_is_repeated_at_the_next_call() -> None:
    late: Any = LateSandbox()
    sandbox, call = LazySandbox(late), CodeRequested(0, 0, "jupyter_code", "1", "")
    with pytest.raises(SandboxFailure, match="no Docker"):
        await sandbox.run(call)
    for _ in range(2):
        assert isinstance(await sandbox.run(call), CodeResult)
    assert late.num_starts == 2
