"""Waiting for coroutines and interrupts, and timeouts that do not count the time in which this process stood still."""

import asyncio
import os
import signal
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")

_HEARTBEATS_MISSED = 3  # by this process, before it counts as suspended


async def wait_for_first(*works: Awaitable[Result]) -> Result:
    """The result of the first coroutine that ends. Cancels the others and waits for their end.

    If several end at the same time, the earliest argument counts. Raises its exception.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_for_exit(pid: int) -> None:
    """Waits for the end of a process, without polling; returns immediately if it does not exist."""
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
    """^C or SIGTERM sets the event. Needs a running event loop."""
    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    return interrupted


class SuspensionGuard:
    """Detects that this process was suspended or starved of CPU time, so that it has received no heartbeats meanwhile.

    The timeouts of other processes then start again.
    """

    def __init__(self, heartbeat_s: float) -> None:
        """Needs a running event loop. `check` must be called about every `heartbeat_s`."""
        self._loop = asyncio.get_running_loop()
        self._max_gap_s = _HEARTBEATS_MISSED * heartbeat_s
        self._last_check = self._loop.time()

    def check(self) -> bool:
        """Whether too much time has passed since the previous call."""
        now = self._loop.time()
        gap_s, self._last_check = now - self._last_check, now
        return gap_s > self._max_gap_s
