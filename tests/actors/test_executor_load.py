"""The load reports of an executor have running and queued calls, and their durations."""

import asyncio
from contextlib import ExitStack

from structlog.testing import capture_logs

from asterism.actors.executor import report_load
from asterism.sandbox.load_gauge import LoadGauge


def test_a_call_without_a_slot_is_queued_and_a_notebook_can_take_several_slots() -> None:
    now = 0.0
    gauge = LoadGauge(lambda: now)
    with gauge.track_call():
        now = 2.0
        with gauge.track_slot(), gauge.track_call():
            now = 3.0
            load = gauge.get_load()
            assert (load.running, load.queued) == (1, 1)
        now = 4.0
        with gauge.track_slot():
            now = 9.0
    load = gauge.get_load()
    assert (load.running, load.queued, load.done) == (0, 0, 2)
    assert (load.running_s, load.queued_s, load.busy_s) == (1 + 5, 2 + 1 + 1, 1 + 5)


def test_two_concurrent_calls_are_two_call_seconds_and_one_busy_second() -> None:
    now = 0.0
    gauge = LoadGauge(lambda: now)
    with ExitStack() as calls:
        for _ in range(2):
            calls.enter_context(gauge.track_call())
            calls.enter_context(gauge.track_slot())
        now = 1.0
    assert (gauge.get_load().running_s, gauge.get_load().busy_s) == (2, 1)


def test_failed_and_cancelled_calls_count_as_done() -> None:
    gauge = LoadGauge(lambda: 0.0)
    for error in (ValueError, asyncio.CancelledError):
        try:
            with gauge.track_call(), gauge.track_slot():
                raise error
        except error:
            pass
    with gauge.track_grading():
        assert gauge.get_load().gradings == 1
    load = gauge.get_load()
    assert (load.running, load.queued, load.done, load.gradings, load.graded) == (0, 0, 2, 0, 1)


async def test_a_changing_load_is_logged_each_second_and_once_at_the_end() -> None:
    gauge = LoadGauge(asyncio.get_running_loop().time)
    with capture_logs() as logged:
        reporting = asyncio.create_task(report_load("executor-0/1", 3, gauge.get_load))
        await asyncio.sleep(10.5)
        with gauge.track_call(), gauge.track_slot():
            await asyncio.sleep(2)
        await asyncio.sleep(10)
        with gauge.track_call(), gauge.track_slot():
            await asyncio.sleep(0.25)
        reporting.cancel()
        await asyncio.wait([reporting])
    assert all(entry["event"] == "executor.load" and entry["executor"] == "executor-0/1" for entry in logged)
    assert [(entry["running"], entry["done"], entry["busy_s"]) for entry in logged] == [
        *((1, 0, 0.5), (1, 0, 1.5), (0, 1, 2.0)),
        (0, 2, 2.25),
    ]
