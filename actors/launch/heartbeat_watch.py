"""A heartbeat watch detects that a child process, or one of the learner ranks that it starts, hangs.

A process hangs if it sends no heartbeat within `supervision.heartbeat_timeout_s`, or if one of its operations takes
longer than its limit (asterism.bus.process.operations).
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from asterism.bus.process.heartbeat import Heartbeat
from asterism.bus.process.operations import RunningOperation, describe_operations, load_operations, operations_path
from asterism.bus.process.waiting import SuspensionGuard
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import SupervisionConfig

_LATE_HEARTBEATS = 3  # a sender without a heartbeat for that many intervals is suspect if another sender hangs


class Hang(NamedTuple):
    cause: str  # such as "learner rank 1: no heartbeat for 12.0 s, in save since 14.0 s"
    duration_s: float


class HeartbeatWatch:
    """Heartbeats of one incarnation of a child: those of its process, or of several `senders`, such as ranks."""

    def __init__(
        self, senders: Sequence[str], incarnation: int, settings: SupervisionConfig, folder: RunFolder
    ) -> None:
        """Start to wait for the first heartbeat. Needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._incarnation = incarnation
        self._settings = settings
        self._paths = {sender: operations_path(folder, sender) for sender in senders}
        self._last_times = dict.fromkeys(senders, self._loop.time())
        self._started: set[str] = set()  # senders that have sent a heartbeat
        self._measured_since = self._loop.time()  # since when this process has run without a suspension

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Record the time of the heartbeat, unless another sender or incarnation sent it."""
        if heartbeat.incarnation == self._incarnation and heartbeat.process in self._last_times:
            self._last_times[heartbeat.process] = self._loop.time()
            self._started.add(heartbeat.process)

    async def wait_for_exit(self, process: asyncio.subprocess.Process) -> Hang | None:
        """Wait until the process has exited (None), or hangs."""
        # One wait for the whole loop: asyncio keeps an object for each cancelled wait until the process exits.
        exit_wait = asyncio.ensure_future(process.wait())
        try:
            return await self._wait_for_hang(exit_wait)
        finally:
            exit_wait.cancel()

    async def _wait_for_hang(self, exit_wait: asyncio.Future[int]) -> Hang | None:
        guard = SuspensionGuard(self._settings.heartbeat_s)
        while True:
            exited, _ = await asyncio.wait([exit_wait], timeout=self._settings.heartbeat_s)
            if exited:
                return None
            if guard.check():
                now = self._measured_since = self._loop.time()
                self._last_times = dict.fromkeys(self._last_times, now)
            if (hang := self._find_hang()) is not None:
                return hang

    def _find_hang(self) -> Hang | None:
        silent = [sender for sender in self._paths if self._is_silent(sender)]
        slow = [sender for sender in self._paths if any(self._list_overdue(sender))]
        if not silent and not slow:
            return None
        late = [sender for sender in self._paths if sender in self._started and self._is_late(sender)]
        suspects = dict.fromkeys((*silent, *late, *slow))
        durations = [self._get_silence_s(sender) for sender in silent]
        durations += [operation.get_elapsed_s() for sender in slow for operation in self._list_overdue(sender)]
        return Hang("; ".join(map(self._describe, suspects)), max(durations))

    def _get_silence_s(self, sender: str) -> float:
        return self._loop.time() - self._last_times[sender]

    def _is_late(self, sender: str) -> bool:
        return self._get_silence_s(sender) > _LATE_HEARTBEATS * self._settings.heartbeat_s

    def _is_silent(self, sender: str) -> bool:
        settings = self._settings
        has_started = sender in self._started
        timeout_s = settings.heartbeat_timeout_s if has_started else settings.first_heartbeat_timeout_s
        return self._get_silence_s(sender) > timeout_s

    def _load_operations(self, sender: str) -> Sequence[RunningOperation]:
        return load_operations(self._paths[sender], self._incarnation)

    def _list_overdue(self, sender: str) -> Iterator[RunningOperation]:
        """Yield the operations that exceed their limit. Time in which this process was suspended does not count."""
        longest_s = self._loop.time() - self._measured_since
        for operation in self._load_operations(sender):
            if 0 < operation.limit_s < min(operation.get_elapsed_s(), longest_s):
                yield operation

    def _describe(self, sender: str) -> str:
        parts = [f"no heartbeat for {self._get_silence_s(sender):.1f} s"] if self._is_late(sender) else []
        parts += filter(None, [describe_operations(self._load_operations(sender))])
        parts += [f"limit of {each.name}: {each.limit_s:g} s" for each in islice(self._list_overdue(sender), 1)]
        return f"{sender}: {', '.join(parts)}"
