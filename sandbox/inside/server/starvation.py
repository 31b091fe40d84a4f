"""Separates the time that a call used from the time in which the machine gave it no CPU.

    clock = CPU time + sleep + waits for a CPU + stops between its time slices

The kernel counts the waits of each thread in `schedstat`. A wait or a stop counts as the call's own
if other threads of the call, or other calls of this fork server, used the CPU meanwhile. The remaining
waits and stops are load from outside. A call is starved if its clock without this load is below the time
limit: a failure of the infrastructure, not the model's mistake. A call is not starved if the CPU time of
all its threads reaches the limit.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from asterism.sandbox.inside.server.process_tree import TICK_S, ProcessTree

STARVED = "starved"  # a reason to end a call, like "timeout" and "memory"

Call = TypeVar("Call")


class ThreadTimes(NamedTuple):
    """The times of one thread during the call."""

    cpu_s: float
    waited_s: float  # time runnable without a CPU; excludes a wait that has not ended
    thread: int = 0
    is_runnable: bool = False


def compute_outside_wait_s(threads: Iterable[ThreadTimes], total_cpu_s: float) -> float:
    """Return the waits that the call's other threads did not cause: one thread may wait for another.

    `total_cpu_s` counts the whole call. Concurrent waits of several threads add up, so the sum may exceed the clock.
    """
    return sum(max(0.0, each.waited_s - max(0.0, total_cpu_s - each.cpu_s)) for each in threads)


def list_thread_times(
    processes: ProcessTree, pids: Iterable[int], before: Mapping[int, tuple[float, float]], since_s: float
) -> list[ThreadTimes]:
    """Return the times of the call's threads, without their times before the call (`before`, by thread).

    Included are the threads in `before` and threads that started later than `since_s` of the monotonic clock.
    """
    since_s += time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() - TICK_S
    found: list[ThreadTimes] = []
    for pid in pids:
        for thread in processes.list_threads(pid):
            stat = processes.read_file(pid, f"task/{thread}/stat").rpartition(b")")[2].split()
            schedule = processes.read_file(pid, f"task/{thread}/schedstat").split()
            if schedule and stat and (thread in before or int(stat[19]) * TICK_S >= since_s):
                cpu_s, waited_s = before.get(thread, (0.0, 0.0))
                cpu_s, waited_s = int(schedule[0]) / 1e9 - cpu_s, int(schedule[1]) / 1e9 - waited_s
                found.append(ThreadTimes(cpu_s, waited_s, thread, stat[0] == b"R"))
    return found


def is_starved(clock_s: float, waited_s: float, stopped_s: float, limit_s: float) -> bool:
    """Return whether the call is starved. `waited_s`, `stopped_s`: parts of the clock that outside load took."""
    return clock_s - waited_s - stopped_s < limit_s


class PendingWaits(Generic[Call]):
    """Finds threads that wait now: the kernel counts a wait only at its end."""

    def __init__(self) -> None:
        self._looks: dict[Call, tuple[float, dict[int, ThreadTimes]]] = {}

    def find_since(self, call: Call, now: float, threads: Iterable[ThreadTimes]) -> float | None:
        """Return the time of the first check that found the waiting threads, or None if all of them have run since."""
        runnable = {each.thread: each for each in threads if each.is_runnable}
        began_s, waiting = self._looks.get(call, (now, runnable))
        waiting = {thread: times for thread, times in waiting.items() if runnable.get(thread) == times}
        self._looks[call] = began_s, waiting
        return began_s if waiting else None

    def forget(self, call: Call) -> None:
        """Make the next check the first one."""
        self._looks.pop(call, None)


class StopLedger(Generic[Call]):
    """Counts for each call the part of its stops in which the running calls got no CPU.

    `num_running` calls run while the others are stopped. If the running calls used their CPUs all the time,
    the stop is the load of the sandbox; if they used none, the machine was busy with other programs.
    """

    def __init__(self, num_running: int) -> None:
        self._num_running = num_running
        self._total_cpu_s = 0.0  # CPU time of all long calls
        self._cpu_at_stop_s: dict[Call, float] = {}
        self._outside_s: dict[Call, float] = {}

    def add_cpu(self, cpu_s: float) -> None:
        self._total_cpu_s += cpu_s

    def begin_stop(self, call: Call) -> None:
        self._cpu_at_stop_s[call] = self._total_cpu_s

    def end_stop(self, call: Call, stopped_s: float) -> None:
        self._outside_s[call] = self._measure(call, stopped_s) + self._outside_s.get(call, 0.0)
        del self._cpu_at_stop_s[call]

    def measure_outside_s(self, call: Call, stopped_s: float) -> float:
        """Return the outside part of all stops. `stopped_s`: length of a stop that has not ended, or 0."""
        present_s = self._measure(call, stopped_s) if call in self._cpu_at_stop_s else 0.0
        return self._outside_s.get(call, 0.0) + present_s

    def forget(self, call: Call) -> None:
        self._outside_s.pop(call, None)
        self._cpu_at_stop_s.pop(call, None)

    def _measure(self, call: Call, stopped_s: float) -> float:
        used_s = (self._total_cpu_s - self._cpu_at_stop_s[call]) / self._num_running
        return max(0.0, stopped_s - used_s)
