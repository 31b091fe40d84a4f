"""Write errors of the launcher's log."""

from __future__ import annotations

import asyncio
import errno

import pytest

from actors.launch.launcher import LogWriteFailure
from configs.atomic_write import DiskError


def test_waiters_see_the_first_write_error_even_if_it_came_earlier() -> None:
    async def scenario() -> None:
        failure = LogWriteFailure()
        early = asyncio.create_task(failure.wait())
        await asyncio.sleep(0)
        assert not early.done()
        failure.record(DiskError("logs/launcher.jsonl", errno.ENOSPC))
        failure.record(DiskError("logs/launcher.jsonl", errno.EROFS))
        for waiting in (early, failure.wait()):
            with pytest.raises(DiskError, match=r"^logs/launcher\.jsonl: No space left on device$"):
                await waiting

    asyncio.run(scenario())
