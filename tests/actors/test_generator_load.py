"""The load reports of a generator, and their timing."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from tests.actors.generators import INCARNATION, Scene, play, scene, turn
from tests.simulation.clock import run_virtually


def test_the_load_is_reported_four_times_a_second_while_it_changes_and_once_when_it_settles() -> None:
    async def scenario(scene: Scene) -> None:
        await asyncio.sleep(5)
        await scene.send(turn(1, 11))  # 1.1 s
        await asyncio.sleep(20)
        assert [at for at, _ in scene.reports] == [5.25, 5.5, 5.75, 6.0, 6.25]
        assert [report.running for _, report in scene.reports] == [1, 1, 1, 1, 0]
        assert scene.reports[-1][1].decode_steps == 11
        assert scene.reports[-1][1].busy_s == pytest.approx(1.1)
        assert (scene.reports[-1][1].version, scene.reports[-1][1].incarnation) == (4, INCARNATION)
        assert scene.reports[-1][1].evicted_tokens == 0

    play(scenario)


def test_an_unchanged_load_with_a_turn_in_flight_is_not_reported() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(turn(1, 0))  # nothing to generate: the load never changes
        await asyncio.sleep(3)
        assert len(scene.reports) == 1
        await scene.send(turn(2, 1))
        await asyncio.sleep(3)
        assert [report.decode_steps for _, report in scene.reports] == [0, 1]

    play(scenario)


def test_each_report_is_logged() -> None:
    async def scenario(scene: Scene) -> None:
        with structlog.testing.capture_logs() as logged:
            await scene.send(turn(1, 1))
            await asyncio.sleep(2)
        lines = [line for line in logged if line["event"] == "engine.load"]
        assert [line["decode_steps"] for line in lines] == [report.decode_steps for _, report in scene.reports] == [1]

    play(scenario)


def test_the_work_after_the_last_report_is_logged_at_the_end() -> None:
    async def whole() -> None:
        async with scene() as each:
            await each.send(turn(1, 10))
            await asyncio.sleep(0.65)  # a report at 0.5
        assert [report.decode_steps for _, report in each.reports] == [2, 4]

    with structlog.testing.capture_logs() as logged:
        run_virtually(whole())
    assert [line["decode_steps"] for line in logged if line["event"] == "engine.load"] == [2, 4, 6]
