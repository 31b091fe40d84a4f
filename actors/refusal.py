"""A launcher whose own log the disk refuses: it ends the run, in order, instead of going on unseen."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from configs.disk import DiskRefused


class Refusal:
    def __init__(self) -> None:
        self._first: DiskRefused | None = None
        self._noted = asyncio.Event()

    def note(self, error: DiskRefused) -> None:
        """On the event loop's thread."""
        self._first = self._first or error
        self._noted.set()

    async def wait(self) -> NoReturn:
        """Raises DiskRefused, once a line could not be written."""
        await self._noted.wait()
        assert self._first is not None
        raise self._first
