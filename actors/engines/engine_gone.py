"""A generator ends immediately, without further messages, when its engine is lost for good.

The launcher then reports that the engine has left, and each of its turns is requested once again.
A failure that the generator reports would count in addition, so the generator reports none while `is_set`.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from asterism.engine.contract import EngineFailure


class EngineGoneSignal:
    """A signal that cancels the task that created it."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._cause: str | None = None

    @property
    def is_set(self) -> bool:
        return self._cause is not None

    def cancel_task(self, cause: str) -> None:
        """Cancel the task, which runs only its cleanup from now on."""
        assert self._task is not None, "EngineGoneSignal must be created in a task"
        if self._cause is None:
            self._cause = cause
            self._task.cancel()

    @contextmanager
    def raising_engine_failure(self) -> Generator[None]:
        """Raise EngineFailure after `cancel_task`, or instead of a group with only EngineFailures."""
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
            raise EngineFailure("; ".join(_collect_messages(failures))) from group


def _collect_messages(group: ExceptionGroup[EngineFailure]) -> list[str]:
    messages: dict[str, None] = {}
    for error in group.exceptions:
        for message in _collect_messages(error) if isinstance(error, ExceptionGroup) else [str(error)]:
            messages[message] = None
    return list(messages)
