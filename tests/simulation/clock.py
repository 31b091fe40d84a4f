"""An event loop with a virtual clock, which jumps to the next timer.

Simulated hours take milliseconds, and runs do not depend on the speed of the machine.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

Result = TypeVar("Result")


class Deadlock(Exception):
    """All tasks wait and no timer is pending. The message lists each task and its position."""


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that advances the clock of the loop instead of waiting."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:  # no system call, which is costly, while callbacks are ready
            return []
        ready = super().select(0)
        if not ready and timeout is None:
            waiting = [f"{task.get_name()}: {task.get_stack(limit=1)}" for task in asyncio.all_tasks(self.loop)]
            raise Deadlock("; ".join(sorted(waiting)))
        if not ready and timeout:
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.loop = self
        self.now = 0.0
        self._thread = threading.get_ident()

    def time(self) -> float:
        return self.now

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        """Do not wake the loop up: all calls come from its own thread."""
        if threading.get_ident() == self._thread:
            return self.call_soon(callback, *args, context=context)
        return super().call_soon_threadsafe(callback, *args, context=context)


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine like asyncio.run, on a virtual clock. Raises Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
