"""Functions that wait for coroutines and interrupts, and timeouts without the time of a suspended process."""

import asyncio
import contextlib
import os
import signal
import stat
from collections.abc import Awaitable, Coroutine
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")

_FORWARDED = (signal.SIGTERM, signal.SIGHUP)
_HEARTBEATS_MISSED = 3  # heartbeat intervals without a check, after which this process counts as suspended


async def wait_for_first(*works: Awaitable[Result]) -> Result:
    """Return the result of the first coroutine that ends; cancel the others and wait for their end.

    If several end at the same time, the earliest argument counts. Raises the exception of that coroutine.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        await cancel_tasks(*tasks)


async def cancel_tasks(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel the tasks and wait for their end."""
    existing = [task for task in tasks if task is not None]
    for task in existing:
        task.cancel()
    await asyncio.gather(*existing, return_exceptions=True)


def start_task(tasks: set[asyncio.Task[Result]], work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Start a task that stays in `tasks` until it ends: the event loop alone does not keep it."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def wait_for_exit(pid: int) -> None:
    """Wait for the end of a process, without polling; return immediately if the process does not exist."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def make_interrupt_event() -> asyncio.Event:
    """Return an event that ^C, SIGTERM or SIGHUP sets. Needs a running event loop."""
    forward_to_sigint()
    interrupted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    return interrupted


def forward_to_sigint() -> None:
    """Treat SIGTERM and SIGHUP, which a lost terminal sends, like ^C, with and without an event loop.

    Only the first signal counts, so that a second signal does not interrupt the cleanup. `nohup` keeps its effect.
    """

    def forward(number: int, _: FrameType | None) -> None:
        for each in _FORWARDED:
            if signal.getsignal(each) is forward:
                signal.signal(each, _ignore_signal)
        if number == signal.SIGHUP:
            _replace_lost_terminal()
        signal.raise_signal(signal.SIGINT)

    for number in _FORWARDED:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, forward)


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """Ignore the signal. Unlike SIG_IGN, this handler is not inherited by child processes."""


def _replace_lost_terminal() -> None:
    """Replace a lost terminal by /dev/null: each write to it would raise OSError."""
    for fd in (0, 1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(fd).st_mode) and not os.isatty(fd):
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, fd)
                os.close(null)


class SuspensionGuard:
    """Detects that this process was suspended or starved of CPU time, so that it received no heartbeats.

    The timeouts of other processes then start again.
    """

    def __init__(self, heartbeat_s: float) -> None:
        """Start the guard in a running event loop. `check` must be called about every `heartbeat_s`."""
        self._loop = asyncio.get_running_loop()
        self._max_gap_s = _HEARTBEATS_MISSED * heartbeat_s
        self._last_check = self._loop.time()

    def check(self) -> bool:
        """Return whether too much time has passed since the previous call."""
        now = self._loop.time()
        gap_s, self._last_check = now - self._last_check, now
        return gap_s > self._max_gap_s
