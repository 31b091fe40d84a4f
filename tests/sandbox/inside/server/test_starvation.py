"""Tests of the decision between a model's mistake and a machine that gave a call no CPU."""

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.sandbox.inside.server.process_tree import ProcessTree
from asterism.sandbox.inside.server.starvation import (
    PendingWaits,
    StopLedger,
    ThreadTimes,
    compute_outside_wait_s,
    is_starved,
    list_thread_times,
)

SECONDS = st.floats(0, 100)


@pytest.mark.parametrize(
    ("clock_s", "waited_s", "stopped_s", "starved"),
    [
        (4.0, 3.75, 0.0, True),  # the call used 0.25 s of CPU time
        (4.0, 0.0, 0.0, False),  # an endless loop or a sleep on an idle machine
        (4.0, 2.9, 0.0, False),  # the call has 1.1 s of own time
        (4.0, 3.1, 0.0, True),
        (4.0, 1.6, 1.6, True),  # waits and stops are load from outside
        (1.0, 0.0, 0.0, False),
    ],
)
def test_a_call_is_starved_if_its_own_time_is_below_the_limit(
    clock_s: float, waited_s: float, stopped_s: float, starved: bool
) -> None:
    assert is_starved(clock_s, waited_s, stopped_s, limit_s=1.0) is starved


@pytest.mark.parametrize(
    ("threads", "total_cpu_s", "outside_s"),
    [
        ([], 0.0, 0.0),
        ([ThreadTimes(0.2, 3.8)], 0.2, 3.8),  # the only thread waits for other programs
        ([ThreadTimes(1.0, 3.0)] * 4, 4.0, 0.0),  # four own threads on one CPU
        ([ThreadTimes(0.5, 3.5)] * 16, 8.0, 0.0),  # sixteen own threads on two CPUs
        ([ThreadTimes(0.1, 2.1), ThreadTimes(0.1, 1.8)], 0.2, 3.7),  # two threads in turn on a starved machine
        ([ThreadTimes(0.01, 0.0), ThreadTimes(0.1, 3.8)], 0.11, 3.79),  # a thread sleeps until its starved child ends
        ([ThreadTimes(0.1, 1.0)], 3.1, 0.0),  # children that have ended used the CPU
    ],
)
def test_a_wait_for_own_threads_is_no_wait_from_outside(
    threads: list[ThreadTimes], total_cpu_s: float, outside_s: float
) -> None:
    assert compute_outside_wait_s(threads, total_cpu_s) == pytest.approx(outside_s)


@given(st.lists(st.builds(ThreadTimes, SECONDS, SECONDS), max_size=8))
def test_the_wait_from_outside_is_at_most_the_total_wait(threads: list[ThreadTimes]) -> None:
    outside_s = compute_outside_wait_s(threads, sum(each.cpu_s for each in threads))
    assert 0 <= outside_s <= sum(each.waited_s for each in threads)


@given(st.integers(1, 4), st.integers(1, 64), SECONDS)
def test_threads_that_wait_only_for_each_other_have_no_wait_from_outside(cpus: int, num: int, wall_s: float) -> None:
    running = min(cpus, num) / num
    threads = [ThreadTimes(wall_s * running, wall_s * (1 - running))] * num
    assert compute_outside_wait_s(threads, wall_s * running * num) == pytest.approx(0.0, abs=1e-9)


def test_a_pending_wait_is_found_until_its_thread_has_run() -> None:
    waits = PendingWaits[str]()
    waiting, other = ThreadTimes(0.1, 0.2, thread=7, is_runnable=True), ThreadTimes(0.0, 0.0, thread=8)
    assert waits.find_since("a", 1.0, [waiting, other]) == 1.0
    assert waits.find_since("a", 1.5, [waiting, other]) == 1.0
    ran = waiting._replace(waited_s=3.0)
    assert waits.find_since("a", 2.0, [ran, other]) is None
    waits.forget("a")
    assert waits.find_since("a", 4.0, [ran, other]) == 4.0
    assert waits.find_since("a", 5.0, [ran._replace(is_runnable=False), other]) is None


def test_a_call_whose_threads_all_sleep_has_no_pending_wait() -> None:
    assert PendingWaits[str]().find_since("a", 1.0, [ThreadTimes(0.1, 0.2, thread=7)]) is None


def test_a_stop_is_load_of_the_sandbox_if_other_calls_use_the_cpu() -> None:
    ledger = StopLedger[str](num_running=1)
    ledger.begin_stop("a")
    ledger.add_cpu(3.0)
    assert ledger.measure_outside_s("a", 3.0) == 0.0
    ledger.end_stop("a", 3.0)
    assert ledger.measure_outside_s("a", 0.0) == 0.0


def test_a_stop_is_load_from_outside_if_no_call_gets_a_cpu() -> None:
    ledger = StopLedger[str](num_running=2)
    ledger.add_cpu(50.0)  # CPU time before the stop
    ledger.begin_stop("a")
    ledger.add_cpu(0.4)
    ledger.end_stop("a", 3.0)
    ledger.begin_stop("a")
    assert ledger.measure_outside_s("a", 1.0) == pytest.approx(2.8 + 1.0)
    ledger.forget("a")
    assert ledger.measure_outside_s("a", 1.0) == 0.0


@pytest.mark.slow
def test_threads_of_an_earlier_cell_are_not_counted() -> None:
    done = threading.Event()
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        processes, own = ProcessTree(proc), [os.getpid()]
        later_s = 1e9
        assert list_thread_times(processes, own, {}, later_s) == []
        assert [each.thread for each in list_thread_times(processes, own, {os.getpid(): (0.0, 0.0)}, later_s)] == own
        before = len(list_thread_times(processes, own, {}, 0.0))
        threads = [threading.Thread(target=done.wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert len(list_thread_times(processes, own, {}, 0.0)) == before + 3
        done.set()
        for thread in threads:
            thread.join()
    finally:
        done.set()
        os.close(proc)
