"""What an executor says of its load: calls that run and that wait, and the time that they took."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from structlog.testing import capture_logs

from actors.executor_load import report_load
from sandbox.gauge import Gauge
from tests.simulation.clock import run_virtually


def test_a_call_waits_until_it_has_a_slot_and_a_notebook_may_take_several() -> None:
    now = 0.0
    gauge = Gauge(lambda: now)
    with gauge.call():
        now = 2.0
        with gauge.slot(), gauge.call():
            now = 3.0
            load = gauge.load()
            assert (load.running, load.queued) == (1, 1)
        now = 4.0
        with gauge.slot():
            now = 9.0
    load = gauge.load()
    assert (load.running, load.queued, load.done) == (0, 0, 2)
    assert (load.running_s, load.queued_s, load.busy_s) == (1 + 5, 2 + 1 + 1, 1 + 5)


def test_two_calls_side_by_side_are_two_call_seconds_and_one_busy_second() -> None:
    now = 0.0
    gauge = Gauge(lambda: now)
    with ExitStack() as calls:
        for _ in range(2):
            calls.enter_context(gauge.call())
            calls.enter_context(gauge.slot())
        now = 1.0
    assert (gauge.load().running_s, gauge.load().busy_s) == (2, 1)


def test_a_call_that_breaks_or_is_stopped_has_ended() -> None:
    gauge = Gauge(lambda: 0.0)
    for error in (ValueError, asyncio.CancelledError):
        try:
            with gauge.call(), gauge.slot():
                raise error
        except error:
            pass
    with gauge.grading():
        assert gauge.load().gradings == 1
    load = gauge.load()
    assert (load.running, load.queued, load.done, load.gradings, load.graded) == (0, 0, 2, 0, 1)


def test_a_line_a_second_while_something_runs_one_afterwards_and_the_last_at_the_end() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        gauge = Gauge(loop.time)
        reporting = asyncio.create_task(report_load("executor-0/1", 3, gauge.load))
        await asyncio.sleep(10.5)
        with gauge.call(), gauge.slot():
            await asyncio.sleep(2)
        await asyncio.sleep(10)
        with gauge.call(), gauge.slot():
            await asyncio.sleep(0.25)
        reporting.cancel()
        await asyncio.wait([reporting])

    with capture_logs() as said:
        run_virtually(scenario())
    assert all(entry["event"] == "executor.load" and entry["executor"] == "executor-0/1" for entry in said)
    assert [(entry["running"], entry["done"], entry["busy_s"]) for entry in said] == [
        *((1, 0, 0.5), (1, 0, 1.5), (0, 1, 2.0)),
        (0, 2, 2.25),
    ]
