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
        future = Future[Result]()

        def interrupt(*_: object) -> None:
            """Raises no exception for `on_interrupt`: one before the wait would leave the coroutine behind."""
            if on_interrupt is None:
                future.cancel()
                raise KeyboardInterrupt
            # A second hop: the coroutine begins first.
            self._loop.call_soon_threadsafe(self._loop.call_soon, on_interrupt)

        previous = signal.signal(
            signal.SIGINT, interrupt
        )  # polars' handler restarts waits, so that ^C would not end them
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
