"""What a generator reports of its engine's load, and when."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from tests.actors.generators import LIFE, Scene, play, scene, turn
from tests.simulation.clock import run_virtually


def test_the_load_is_reported_four_times_a_second_while_it_works_and_once_when_it_has_come_to_rest() -> None:
    async def scenario(scene: Scene) -> None:
        await asyncio.sleep(5)
        await scene.tell(turn(1, 11))  # 1.1 s
        await asyncio.sleep(20)
        assert [at for at, _ in scene.reports] == [5.25, 5.5, 5.75, 6.0, 6.25]
        assert [report.running for _, report in scene.reports] == [1, 1, 1, 1, 0]
        assert scene.reports[-1][1].decode_steps == 11
        assert scene.reports[-1][1].busy_s == pytest.approx(1.1)
        assert (scene.reports[-1][1].version, scene.reports[-1][1].life) == (4, LIFE)
        assert scene.reports[-1][1].evicted_tokens == 0

    play(scenario)


def test_an_engine_that_stands_still_with_a_turn_under_way_is_watched_and_reports_nothing() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.tell(turn(1, 0))  # nothing to generate: the load never changes
        await asyncio.sleep(3)
        assert len(scene.reports) == 1
        await scene.tell(turn(2, 1))
        await asyncio.sleep(3)
        assert [report.decode_steps for _, report in scene.reports] == [0, 1]

    play(scenario)


def test_each_report_is_a_line_of_the_log() -> None:
    async def scenario(scene: Scene) -> None:
        with structlog.testing.capture_logs() as logged:
            await scene.tell(turn(1, 1))
            await asyncio.sleep(2)
        lines = [line for line in logged if line["event"] == "engine.load"]
        assert [line["decode_steps"] for line in lines] == [report.decode_steps for _, report in scene.reports] == [1]

    play(scenario)


def test_what_it_did_between_its_last_report_and_its_end_is_in_its_log() -> None:
    async def whole() -> None:
        async with scene() as each:
            await each.tell(turn(1, 10))
            await asyncio.sleep(0.65)  # a report at 0.5
        assert [report.decode_steps for _, report in each.reports] == [2, 4]

    with structlog.testing.capture_logs() as logged:
        run_virtually(whole())
    assert [line["decode_steps"] for line in logged if line["event"] == "engine.load"] == [2, 4, 6]
