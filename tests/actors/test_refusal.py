"""A launcher whose own log the disk refuses."""

from __future__ import annotations

import asyncio
import errno

import pytest

from actors.refusal import Refusal
from configs.disk import DiskRefused


def test_who_waits_hears_of_the_first_line_that_could_not_be_written_also_if_it_was_before() -> None:
    async def scenario() -> None:
        refusal = Refusal()
        early = asyncio.create_task(refusal.wait())
        await asyncio.sleep(0)
        assert not early.done()
        refusal.note(DiskRefused("logs/launcher.jsonl", errno.ENOSPC))
        refusal.note(DiskRefused("logs/launcher.jsonl", errno.EROFS))
        for waiting in (early, refusal.wait()):
            with pytest.raises(DiskRefused, match=r"^logs/launcher\.jsonl: No space left on device$"):
                await waiting

    asyncio.run(scenario())
