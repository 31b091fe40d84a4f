"""When a server counts as dead that has not ended: nobody answers there, or it is stopped, or hangs."""

from __future__ import annotations

import asyncio

from engine.sglang.client import SGLangClient

ASK_EVERY_S = 2.0
SILENT_TIMES = 3  # in a row


async def until_it_answers(client: SGLangClient, ready_s: float, ask_every_s: float = ASK_EVERY_S) -> None:
    while True:
        if await client.answers(ready_s):
            return
        await asyncio.sleep(ask_every_s)


async def until_silent(client: SGLangClient, ready_s: float, ask_every_s: float = ASK_EVERY_S) -> None:
    """Returns when it has not answered SILENT_TIMES, each within `ready_s`. What it answers does not count: while it is
    paused, and while it takes weights, it says that it is not ready."""
    silent = 0
    while silent < SILENT_TIMES:
        await asyncio.sleep(ask_every_s)
        silent = 0 if await client.answers(ready_s) else silent + 1
