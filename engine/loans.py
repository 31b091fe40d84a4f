"""The memory of engines that share the learner's GPUs, as the learner has it: asked for before it computes, given back
with the weights that it publishes."""

from __future__ import annotations

import asyncio

from bus.messages import MemoryLent, MemoryWanted
from bus.transport import Bus

RECIPE = "head/recipe"


class EnginesMemory:
    def __init__(self, bus: Bus, life: int, *, is_lent: bool) -> None:
        """`life` counts the learner's starts. Where nothing `is_lent`, the learner has its memory to itself."""
        self._bus, self._life, self._is_lent = bus, life, is_lent
        self._version: int | None = None  # that was asked before, and has not been published since
        self._lent = asyncio.Event()

    async def take(self, version: int) -> None:
        """Until every engine has given its memory back. No older weights than `version` are published before the next
        call; -1: whichever they are."""
        if not self._is_lent or self._version is not None:
            return
        self._version = version
        self._lent.clear()
        await self._bus.send(RECIPE, MemoryWanted(self._life, version))
        await self._lent.wait()

    def hear(self, lent: MemoryLent) -> None:
        """A former life may have asked for it too."""
        if (lent.life, lent.version) == (self._life, self._version):
            self._lent.set()

    def give_back(self) -> None:
        self._version = None
