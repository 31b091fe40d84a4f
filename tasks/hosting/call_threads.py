"""Threads for sync calls. A thread is reused after its call, because the start of a thread takes longer than a short
call."""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

IDLE = "idle call"  # name of a thread between two calls


class CallThreads:
    """A pool of threads, as many as the largest number of concurrent calls so far."""

    def __init__(self) -> None:
        self._idle: list[_CallThread] = []

    def start(self, call: Callable[[], Any], name: str) -> asyncio.Future[Any]:
        """Start `call`, which must not raise, in a thread with the name `name`, and return its future result."""
        thread = self._idle.pop() if self._idle else _CallThread()
        running = thread.start(call, name)
        running.add_done_callback(lambda _: self._idle.append(thread))
        return running


class _CallThread:
    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=IDLE, daemon=True)
        self._thread.start()

    def start(self, call: Callable[[], Any], name: str) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        running: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            self._thread.name = name
            result = contextvars.Context().run(call)  # context variables of a call do not reach the next call
            self._thread.name = IDLE
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(running.set_result, result)

        self._calls.put(run)
        return running

    def _run(self) -> None:
        while True:
            self._calls.get()()
