"""How a generator ends whose engine will never answer again: at once and in silence.

The launcher says then that the engine has left, and its turns are asked for again, once each. Failures that the generator
told of before would count beside that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from engine.contract import EngineFailure


class Loss:
    """Of the engine that the task serves in which this is made."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._cause: str | None = None

    def note(self, cause: str) -> None:
        """The task goes no further than to what it does at its end."""
        assert self._task is not None, "within a task"
        if self._cause is None:
            self._cause = cause
            self._task.cancel()

    @contextmanager
    def raised(self) -> Generator[None]:
        """A loss that is noted within raises EngineFailure; so does a group of those alone."""
        try:
            yield
        except asyncio.CancelledError:
            if self._cause is None or self._task is None or self._task.uncancel():
                raise
            raise EngineFailure(self._cause) from None
        except ExceptionGroup as group:
            if self._cause is not None:
                raise EngineFailure(self._cause) from group
            failures, others = group.split(EngineFailure)
            if failures is None or others is not None:
                raise
            raise EngineFailure("; ".join(_messages(failures))) from group


def _messages(group: ExceptionGroup[EngineFailure]) -> list[str]:
    """Each once."""
    found: dict[str, None] = {}
    for error in group.exceptions:
        for message in _messages(error) if isinstance(error, ExceptionGroup) else [str(error)]:
            found[message] = None
    return list(found)
