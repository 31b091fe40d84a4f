"""A thread runs an event loop, so that the main thread can wait for the terminal and receive ^C."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

Result = TypeVar("Result")


class BackgroundLoop:
    """A context manager that runs an event loop in a thread. At its end it cancels all tasks of the loop."""

    def __enter__(self) -> "BackgroundLoop":
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="chat-loop", daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def run(self, work: Coroutine[Any, Any, Result], on_interrupt: Callable[[], object] | None = None) -> Result:
        """Run the coroutine and return its result or raise its exception. Must be called on the main thread.

        Each ^C calls `on_interrupt` on the loop; without `on_interrupt`, ^C cancels the coroutine and raises
        KeyboardInterrupt.
        """
        future = Future[Result]()  # a placeholder that ^C can cancel before the coroutine has its own future

        def interrupt(*_: object) -> None:
            """Raise nothing with `on_interrupt`: an exception could end `run` before the wait for the coroutine."""
            if on_interrupt is None:
                future.cancel()
                raise KeyboardInterrupt
            # The second `call_soon` lets the coroutine begin before `on_interrupt` runs.
            self._loop.call_soon_threadsafe(self._loop.call_soon, on_interrupt)

        # This also replaces polars' handler in C, with which Python's handler would not run during the wait.
        previous = signal.signal(signal.SIGINT, interrupt)
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            return future.result()
        except SystemExit:  # a signal handler raised the exception
            future.cancel()
            raise
        finally:
            signal.signal(signal.SIGINT, previous)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        await self._stopped.wait()
