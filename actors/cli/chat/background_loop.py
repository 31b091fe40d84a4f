"""An event loop in a thread, so that the main thread can wait for the terminal and receive ^C."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

Result = TypeVar("Result")


class BackgroundLoop:
    """A context manager. At its end all tasks of the loop are cancelled."""

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
        """The result of the coroutine, or its exception. Called on the main thread.

        `on_interrupt` is called on the loop for each ^C; without it ^C cancels the coroutine and raises
        KeyboardInterrupt.
        """
        future = Future[Result]()  # until the coroutine has its own

        def interrupt(*_: object) -> None:
            """An exception with `on_interrupt` could end this method before its wait, without the coroutine."""
            if on_interrupt is None:
                future.cancel()
                raise KeyboardInterrupt
            # With `call_soon`, the coroutine begins before `on_interrupt`.
            self._loop.call_soon_threadsafe(self._loop.call_soon, on_interrupt)

        # It also replaces polars' handler in C, after which the wait would continue without a call of Python's handler.
        previous = signal.signal(signal.SIGINT, interrupt)
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            return future.result()
        except SystemExit:  # of a signal
            future.cancel()
            raise
        finally:
            signal.signal(signal.SIGINT, previous)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        await self._stopped.wait()
