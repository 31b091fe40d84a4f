"""Calls sync and async functions of a task under a time limit.

A sync function runs in a thread, so that it does not block the event loop. Python cannot stop a thread, so a thread
that exceeds the limit is abandoned and counted, as is a coroutine that suppresses its cancellation. The process exits
when it has abandoned too many calls.
"""

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from asterism.tasks.hosting.call_threads import CallThreads
from asterism.tasks.hosting.host_inspection import LoopDelays

_CANCEL_S = 1.0  # time from the cancellation of a coroutine until it is abandoned


class CallTimedOut(Exception):
    def __init__(self, limit_s: float) -> None:
        super().__init__(f"took longer than {limit_s:g} s")
        self.limit_s = limit_s


class _Ended(NamedTuple):
    value: Any = None
    error: BaseException | None = None


Running = asyncio.Future[_Ended]  # a thread, or the asyncio task of a coroutine


class FunctionCaller:
    """Calls functions. At most `max_threads` sync calls, without abandoned calls, run at the same time."""

    def __init__(self, max_threads: int) -> None:
        self._permits = asyncio.Semaphore(max_threads)
        self._threads = CallThreads()
        self.num_abandoned = 0
        self.delays: LoopDelays | None = None  # None: no measurement of delays

    async def call(
        self,
        function: Callable[..., Any],
        limit_s: float,
        on_abandoned: Callable[[Running], None] | None = None,
        /,
        **arguments: Any,
    ) -> Any:
        """Call the function and return its result. Raises CallTimedOut, and the function's exceptions."""
        with self._measure_delays(function):
            if is_async(function):
                return await self._wait(_start_coroutine(function(**arguments)), limit_s, on_abandoned)
            async with self._permits:
                result = await self._wait(self._start_thread(function, arguments), limit_s, on_abandoned)
            if inspect.isawaitable(result):
                return await self._wait(_start_coroutine(result), limit_s, on_abandoned)
            return result

    def _start_thread(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Running:
        def run() -> _Ended:
            try:
                return _Ended(function(**arguments))
            except BaseException as raised:  # from the user's code; SystemExit must not end only the thread
                return _Ended(error=_make_raisable(raised))

        return self._threads.start(run, f"call {getattr(function, '__name__', '')}")

    def _measure_delays(self, function: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
        name = getattr(function, "__name__", type(function).__name__)
        return (
            contextlib.nullcontext()
            if self.delays is None
            else self.delays.measure(name, is_in_loop=is_async(function))
        )

    async def _wait(self, running: Running, limit_s: float, on_abandoned: Callable[[Running], None] | None) -> Any:
        try:
            await asyncio.wait([running], timeout=limit_s)
        finally:
            has_ended = running.done()
            if not has_ended:
                await self._stop(running, on_abandoned)
        if not has_ended:
            raise CallTimedOut(limit_s)
        ended = running.result()
        if ended.error is not None:
            raise ended.error
        return ended.value

    async def _stop(self, running: Running, on_abandoned: Callable[[Running], None] | None) -> None:
        """Cancel a coroutine. Abandon a thread, and a coroutine that continues."""
        if isinstance(running, asyncio.Task):
            running.cancel()
            await asyncio.wait([running], timeout=_CANCEL_S)
        if running.done():
            return
        self.num_abandoned += 1
        running.add_done_callback(self._on_abandoned_ended)
        if on_abandoned is not None:
            on_abandoned(running)

    def _on_abandoned_ended(self, _: Running) -> None:
        self.num_abandoned -= 1


def _start_coroutine(awaitable: Awaitable[Any]) -> Running:
    """Run the coroutine in a separate asyncio task, so that its CancelledError does not cancel the caller."""

    async def run() -> _Ended:
        try:
            return _Ended(await awaitable)
        except BaseException as raised:
            return _Ended(error=_make_raisable(raised))

    return asyncio.create_task(run())


def _make_raisable(raised: BaseException) -> BaseException:
    """Convert exceptions that end more than the call, such as KeyboardInterrupt, or that a coroutine must not raise."""
    is_plain = isinstance(raised, Exception | SystemExit) and not isinstance(raised, StopIteration)
    return raised if is_plain else RuntimeError(repr(raised))


def is_async(function: Callable[..., Any]) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
