"""Calls sync and async functions of a task under a time limit.

A sync function runs in a thread of its own, so that it does not block the event loop. Python cannot stop a thread: a
thread that exceeds its limit is abandoned and counted, and the process exits when too many threads are.
"""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any


class CallTimedOut(Exception):
    """`abandoned`: ends with the thread that still runs a sync function."""

    def __init__(self, limit_s: float, abandoned: asyncio.Future[Any] | None = None) -> None:
        super().__init__(f"took longer than {limit_s:g} s")
        self.limit_s = limit_s
        self.abandoned = abandoned


class CallRunner:
    """At most `max_threads` sync calls run at the same time, and the others wait; abandoned ones do not count."""

    def __init__(self, max_threads: int) -> None:
        self._permits = asyncio.Semaphore(max_threads)
        self.num_abandoned = 0

    async def call(self, function: Callable[..., Any], limit_s: float, **arguments: Any) -> Any:
        """Raises CallTimedOut, and what the function raises."""
        if is_async(function):
            return await self._await(function(**arguments), limit_s)
        async with self._permits:
            result = await self._call_in_thread(function, limit_s, arguments)
        return await self._await(result, limit_s) if inspect.isawaitable(result) else result

    async def _await(self, awaitable: Any, limit_s: float) -> Any:
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await awaitable
        except TimeoutError:
            if not limit.expired():  # the function's own
                raise
            raise CallTimedOut(limit_s) from None

    async def _call_in_thread(self, function: Callable[..., Any], limit_s: float, arguments: dict[str, Any]) -> Any:
        done = _start_thread(function, arguments)
        try:
            finished, _ = await asyncio.wait([done], timeout=limit_s)
        except asyncio.CancelledError:
            self._abandon(done)
            raise
        if not finished:
            self._abandon(done)
            raise CallTimedOut(limit_s, done)
        return done.result()

    def _abandon(self, done: asyncio.Future[Any]) -> None:
        self.num_abandoned += 1

        def on_end(ended: asyncio.Future[Any]) -> None:
            self.num_abandoned -= 1
            ended.exception()  # marks it as retrieved: no call waits for it

        done.add_done_callback(on_end)


def _start_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> asyncio.Future[Any]:
    """The function's result."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        set_result, outcome = done.set_result, None
        try:
            outcome = function(**arguments)
        except StopIteration as raised:  # a future refuses it
            set_result, outcome = done.set_exception, RuntimeError(repr(raised))
        except BaseException as raised:  # of the user's code; SystemExit must not end only the thread
            set_result, outcome = done.set_exception, raised
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(set_result, outcome)

    threading.Thread(target=run, name=f"call {getattr(function, '__name__', '')}", daemon=True).start()
    return done


def is_async(function: Callable[..., Any]) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
