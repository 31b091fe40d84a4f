"""The report of a host process on its task's code: live instances, threads, child processes, and the delays of the
event loop during calls."""

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

from asterism.tasks.hosting.call_threads import IDLE

_INTERVAL_S = 0.005  # interval of the timer that measures delays
_POOL_THREADS = ("asyncio_", "ThreadPoolExecutor-", IDLE)  # names of threads that are kept for later calls


class LoopDelays:
    """Measures the largest delay of the event loop in each call, by function. Calls must not overlap.

    Delays by other programs on a loaded machine do not count. For a call in the event loop, the measurement subtracts
    the time that the loop's thread waits for a processor. For a call in a separate thread, it counts only the CPU time
    of the loop's thread.
    """

    def __init__(self) -> None:
        self.by_function: defaultdict[str, list[float]] = defaultdict(list)
        self._due_s = self._largest_s = 0.0
        self._is_in_loop = True
        self._cpu_s = self._waited_s = 0.0  # CPU time and wait of the loop's thread, at the start of the timer
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def measure(self, function: str, *, is_in_loop: bool = True) -> Generator[None]:
        """Measure one call. `is_in_loop`: whether the function runs in the event loop, or else in a thread."""
        self._largest_s, self._is_in_loop = 0.0, is_in_loop
        self._restart_timer()
        try:
            yield
        finally:
            self._keep_delay()  # the timer is overdue if the call blocked until its end
            self._cancel_timer()
            self.by_function[function].append(self._largest_s)

    def _restart_timer(self) -> None:
        self._cancel_timer()
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + _INTERVAL_S
        self._cpu_s, self._waited_s = time.thread_time(), read_processor_wait_s()
        self._timer = loop.call_at(self._due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._keep_delay()
        self._restart_timer()

    def _keep_delay(self) -> None:
        delay_s = asyncio.get_running_loop().time() - self._due_s
        if self._is_in_loop:
            delay_s -= read_processor_wait_s() - self._waited_s
        else:
            delay_s = min(delay_s, time.thread_time() - self._cpu_s)
        self._largest_s = max(self._largest_s, delay_s)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def read_processor_wait_s() -> float:
    """Return the time that this thread has waited for a processor, or 0 if the kernel does not count it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def count_instances(instance_class: type[object] | None) -> int:
    """Count the live objects of exactly this class."""
    if instance_class is None:
        return 0
    gc.collect()
    return sum(type(each) is instance_class for each in gc.get_objects())


def list_threads() -> tuple[str, ...]:
    threads = (each for each in threading.enumerate() if each is not threading.main_thread())
    return tuple(each.name for each in threads if not each.name.startswith(_POOL_THREADS))


def list_children() -> tuple[str, ...]:
    """List the command lines of the running child processes."""
    own, found = str(os.getpid()), list[str]()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # the process has ended
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if parent == own and state != "Z":
                found.append((folder / "cmdline").read_text().replace("\0", " ").strip())
    return tuple(found)
