"""The measured delays of the event loop include delays by the task's code, and no delays by other programs."""

import asyncio
import time

import pytest

from asterism.tasks.hosting import host_inspection
from asterism.tasks.hosting.host_inspection import LoopDelays

BLOCKED_S = 0.2
LEAST_S = 0.1

pytestmark = pytest.mark.real_clock


class Loop:
    """The clocks of the event loop's thread: wall time, CPU time, and waiting time for a processor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpu_s = self.waited_s = 0.0
        monkeypatch.setattr(host_inspection.time, "thread_time", lambda: self.cpu_s)
        monkeypatch.setattr(host_inspection, "read_processor_wait_s", lambda: self.waited_s)


async def measure(loop: Loop, *, is_in_loop: bool, cpu_s: float = 0.0, waited_s: float = 0.0) -> float:
    """Return the measured delay of a call; the thread of the loop is stopped for BLOCKED_S during the call."""
    delays = LoopDelays()
    with delays.measure("f", is_in_loop=is_in_loop):
        await asyncio.sleep(0)
        time.sleep(BLOCKED_S)  # noqa: ASYNC251 - blocks the loop on purpose
        loop.cpu_s += cpu_s
        loop.waited_s += waited_s
    (delay_s,) = delays.by_function["f"]
    return delay_s


@pytest.mark.slow
async def test_a_sleep_or_a_computation_in_the_event_loop_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await measure(Loop(monkeypatch), is_in_loop=True) > LEAST_S
    assert await measure(Loop(monkeypatch), is_in_loop=True, cpu_s=BLOCKED_S) > LEAST_S


@pytest.mark.slow
async def test_time_without_a_processor_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await measure(Loop(monkeypatch), is_in_loop=True, waited_s=10.0) == 0.0


@pytest.mark.slow
async def test_the_delay_of_a_sync_function_is_only_the_cpu_time_of_the_loops_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The function runs in another thread. If a busy machine delays the loop, the loop uses no CPU time."""
    assert await measure(Loop(monkeypatch), is_in_loop=False) == 0.0
    assert await measure(Loop(monkeypatch), is_in_loop=False, cpu_s=BLOCKED_S) > LEAST_S


def test_the_waiting_time_of_the_kernel_is_converted_to_seconds() -> None:
    assert host_inspection.read_processor_wait_s() >= 0.0
