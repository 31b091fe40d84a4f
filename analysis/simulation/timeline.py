"""Virtual time: a queue of callbacks that runs them in order of time."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class VirtualTimeline:
    """A queue of callbacks. Callbacks due at the same time run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds since the start
        self._callbacks: list[tuple[float, int, Callable[[Any], None], Any]] = []  # heap
        self._numbers = count()

    @property
    def is_empty(self) -> bool:
        return not self._callbacks

    def call_at(self, at: float, callback: Callable[[Any], None], argument: Any) -> None:
        heapq.heappush(self._callbacks, (at, next(self._numbers), callback, argument))

    def run(self, check: Callable[[], None] | None = None) -> None:
        """Run callbacks until the queue is empty. `check` runs after each callback."""
        while self._callbacks:
            self.now, _, callback, argument = heapq.heappop(self._callbacks)
            callback(argument)
            if check is not None:
                check()
