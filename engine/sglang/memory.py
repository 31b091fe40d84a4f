"""The GPU memory of a server, which it gives back and takes again, with what its weights and its cache then hold lost.

The server has to be idle for it, and dies where it is not: so it says first that it is, and is paused then.
"""

from __future__ import annotations

from typing import Literal

import structlog

from engine.contract import EngineFailure
from engine.sglang.client import SGLangClient

IDLE_S = 60.0  # within it the server has ended what was aborted
Part = Literal["weights", "kv_cache"]
_PARTS: tuple[Part, ...] = ("kv_cache", "weights")


class ServerMemory:
    def __init__(self) -> None:
        self.released: set[Part] = set()
        self._logger = structlog.get_logger()

    async def release(self, client: SGLangClient) -> None:
        """All of it. Raises EngineFailure where the server does not come to rest."""
        parts: list[Part] = [part for part in _PARTS if part not in self.released]
        if not parts:
            return
        if not await client.flush_cache(IDLE_S):
            raise EngineFailure(f"the server was not idle within {IDLE_S:g} s")
        await client.pause("in_place")
        await client.release_memory(parts)
        self.released.update(parts)
        self._logger.info("memory.released", parts=parts)

    async def resume(self, client: SGLangClient, part: Part) -> None:
        """The weights have to come before they are loaded, the cache may after; a released one is not to be used."""
        if part in self.released:
            await client.resume_memory([part])
            self.released.discard(part)
            self._logger.info("memory.resumed", part=part)
