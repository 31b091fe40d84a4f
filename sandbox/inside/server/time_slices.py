"""Schedules the long calls: few run at a time, so that short calls find a free CPU.

A long call may be an endless loop, and a hundred of them would starve a thousand calls of three
milliseconds each. Long calls therefore run in time slices. The call with the fewest slices runs first;
on a tie, the call with the most memory, because its end frees memory. Calls that wait for anything
but a CPU always run. This module uses no clock and no signals.
"""

from typing import Generic, TypeVar

SLICE_CPU_S = 0.5
Call = TypeVar("Call")


class _LongCall:
    __slots__ = ("busy", "cpu_s", "in_slice", "memory_bytes", "num_slices", "order", "stopped")

    def __init__(self, order: int) -> None:
        self.order = order
        self.cpu_s = 0.0  # CPU time in this slice
        self.memory_bytes = 0
        self.num_slices = 0  # complete slices
        self.busy = True
        self.in_slice = False
        self.stopped = False

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        return not self.in_slice, self.num_slices, -self.memory_bytes, self.order


class TimeSlices(Generic[Call]):
    """The slices of long calls: `num_running` busy calls run. `update` and `remove` return (to stop, to resume)."""

    def __init__(self, num_running: int) -> None:
        self._num_running = num_running
        self._long_calls: dict[Call, _LongCall] = {}
        self._num_joined = 0

    def __contains__(self, call: Call) -> bool:
        return call in self._long_calls

    def update(self, call: Call, cpu_s: float, memory_bytes: int, busy: bool) -> tuple[list[Call], list[Call]]:
        """Update a call. `cpu_s` counts since the last update. The first update makes the call a long one."""
        long = self._long_calls.get(call)
        if long is None:
            self._num_joined += 1
            long = self._long_calls[call] = _LongCall(self._num_joined)
        long.cpu_s += cpu_s
        long.memory_bytes = memory_bytes
        long.busy = busy or long.stopped
        long.in_slice = long.in_slice and long.busy
        return self._reschedule()

    def remove(self, call: Call) -> tuple[list[Call], list[Call]]:
        long = self._long_calls.pop(call, None)
        return ([], []) if long is None else self._reschedule()

    def had_slice(self, call: Call) -> bool:
        """Return whether the call has completed a time slice."""
        return call in self._long_calls and self._long_calls[call].num_slices > 0

    def _reschedule(self) -> tuple[list[Call], list[Call]]:
        busy = [(call, long) for call, long in self._long_calls.items() if long.busy]
        for _, long in busy:
            if long.cpu_s >= SLICE_CPU_S:
                long.cpu_s = 0.0
                long.num_slices += 1
                long.in_slice = False
        busy.sort(key=lambda entry: entry[1].rank)
        to_stop: list[Call] = []
        to_resume: list[Call] = []
        for place, (call, long) in enumerate(busy):
            long.in_slice = place < self._num_running
            if long.in_slice == long.stopped:
                (to_resume if long.stopped else to_stop).append(call)
                long.stopped = not long.stopped
        return to_stop, to_resume
