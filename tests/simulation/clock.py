"""An event loop whose clock jumps to the next timer: hours pass in milliseconds, and nothing depends on the machine."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

Result = TypeVar("Result")


class Deadlock(Exception):
    """Nothing is pending: everybody waits for somebody. The message names who waits where."""


class _JumpingSelector(selectors.DefaultSelector):
    """Does not wait: it asks the loop to move its clock instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0:  # there is something to do: who asks the kernel each time spends more on it than on the run
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
        """From this thread without waking the loop, which is awake."""
        if threading.get_ident() == self._thread:
            return self.call_soon(callback, *args, context=context)
        return super().call_soon_threadsafe(callback, *args, context=context)


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """Like asyncio.run, on a clock of its own. Raises Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
