"""What a generator answers, forgets and loads, around an engine that does as it is told."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from msgspec.structs import replace

from actors import generator
from actors.generator import Nearby
from bus.messages import (
    CacheReleased,
    EngineRested,
    LeaseReleased,
    RestRequested,
    SessionEnded,
    TurnAborted,
    TurnFailed,
    TurnGenerated,
    WeightsLoaded,
    WeightsPublished,
)
from engine.contract import WeightsRefused
from tests.actors.generators import LIFE, STEP_S, Scene, play, turn


def test_an_answer_names_the_lease_under_which_it_was_asked_for() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.tell(turn(1, 3, lease=7))
        answer = (await scene.rollout.receive()).message
        assert isinstance(answer, TurnGenerated)
        assert (answer.turn, answer.lease, answer.finish) == (2, 7, "length")
        await scene.tell(turn(2, lease=8, first=666))
        assert (await scene.rollout.receive()).message == TurnFailed(2, 2, 8, "engine: out of memory")

    play(scenario)


def test_a_cache_is_forgotten_when_its_trajectory_ends_or_the_arbiter_gives_it_up_but_not_under_a_later_lease() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.tell(turn(1, 1), turn(2, 1, lease=4), turn(3, 1))
        await asyncio.sleep(0.01)  # what is in the control lane would overtake them
        await scene.tell(LeaseReleased(1, 3), CacheReleased(2, 3), CacheReleased(3, 1))
        await asyncio.sleep(1)
        assert scene.engine.forgotten == [1, 3]

    play(scenario)


def test_a_turn_that_comes_twice_or_after_its_trajectorys_end_is_taken_once() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.tell(turn(1, 1, lease=2), turn(1, 1, lease=2), turn(1, 1))
        await asyncio.sleep(1)
        await scene.tell(turn(1, 1, lease=2), turn(1, 1, lease=3))
        await asyncio.sleep(1)
        assert scene.engine.asked == [1, 1]
        await scene.tell(LeaseReleased(1, 4), turn(1, 1, lease=3), turn(1, 1, lease=4), CacheReleased(1, 3))
        await asyncio.sleep(1)
        assert scene.engine.asked == [1, 1]
        assert scene.engine.forgotten == [1]
        assert scene.rollout.waiting == 2

    play(scenario)


def test_a_turn_whose_lease_is_of_another_life_fails_at_once() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.tell(turn(1, lease=7, life=LIFE - 1))
        cause = "engine left: its lease is of life 2, this is life 3"
        assert (await scene.rollout.receive()).message == TurnFailed(1, 2, 7, cause)
        assert scene.engine.asked == []

    play(scenario)


def test_a_turn_that_is_to_stop_before_the_engine_has_it_is_answered_with_nothing() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.tell(turn(1), TurnAborted(1, 1))  # both are there when the generator looks
        answer = (await scene.rollout.receive()).message
        assert answer == TurnGenerated(1, 2, 1, b"", b"", b"", "abort")
        assert scene.engine.asked == []
        await scene.tell(turn(1, 1, lease=2))  # the next one is another matter
        assert isinstance((await scene.rollout.receive()).message, TurnGenerated)
        assert scene.engine.asked == [1]

    play(scenario)


def test_the_word_to_stop_a_turn_reaches_the_engine_and_a_later_turn_is_not_meant() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.tell(turn(1, lease=2))
        await asyncio.sleep(0.5)
        await scene.tell(TurnAborted(1, 1), TurnAborted(2, 1))
        await asyncio.sleep(0.1)
        assert scene.engine.stopped == []
        await scene.tell(TurnAborted(1, 2))
        await asyncio.sleep(0.1)
        assert scene.engine.stopped == [1]

    play(scenario)


def test_weights_that_come_twice_or_late_are_not_loaded_again_and_answered_all_the_same() -> None:
    def published(version: int) -> WeightsPublished:
        return WeightsPublished(version, "", 4, "")

    async def scenario(scene: Scene) -> None:
        await scene.tell(*(published(version) for version in (5, 6, 5, 6, 3)))
        answers = [(await scene.rollout.receive()).message for _ in range(5)]
        assert [answer.version for answer in answers if isinstance(answer, WeightsLoaded)] == [5, 6, 5, 6, 3]
        assert scene.engine.loaded == [5, 6]

    play(scenario)


def test_nothing_is_generated_before_the_first_weights_are_loaded() -> None:
    """The turn of a trajectory that was leased to a new engine may overtake them; what is to stop meanwhile is stopped."""

    async def scenario(scene: Scene) -> None:
        await scene.tell(turn(1, 2), turn(2, 2), TurnAborted(2, 1))
        await asyncio.sleep(5.0)
        assert scene.engine.asked == []
        await scene.tell(*(WeightsPublished(version, "", 4, "") for version in (0, 1, 2)))
        await asyncio.sleep(2.5 * STEP_S)
        assert (scene.engine.asked, scene.engine.version) == ([], 1)  # those of a former life are not what it waits for
        answers = [(await scene.rollout.receive()).message for _ in range(5)]
        assert scene.engine.asked == [1]
        assert [answer.finish for answer in answers if isinstance(answer, TurnGenerated)] == ["abort", "length"]

    play(scenario, version=-1)


FETCH_S = 3.0


def fetching() -> tuple[Nearby, list[int]]:
    """Fetches for FETCH_S, and what; version 6 is there no more."""
    fetched: list[int] = []

    async def nearby(published: WeightsPublished) -> WeightsPublished:
        fetched.append(published.version)
        await asyncio.sleep(FETCH_S)
        if published.version == 6:
            raise WeightsRefused("gone")
        return replace(published, path=f"here/{published.version}")

    return nearby, fetched


def test_weights_of_another_machine_are_fetched_once_and_loaded_from_where_they_lie_then() -> None:
    nearby, fetched = fetching()

    async def scenario(scene: Scene) -> None:
        with structlog.testing.capture_logs() as logged:
            await scene.tell(*(WeightsPublished(version, f"there/{version}", 44, "") for version in (5, 5, 6, 7, 4)))
            answers = [(await scene.rollout.receive()).message for _ in range(4)]
        assert [answer.version for answer in answers if isinstance(answer, WeightsLoaded)] == [5, 5, 7, 4]
        assert (fetched, scene.engine.paths) == ([5, 6, 7], ["here/5", "here/7"])
        lines = [line for line in logged if line["event"] == "weights.fetched"]
        assert [(line["version"], line["bytes"], line["fetch_s"]) for line in lines] == [
            (5, 44, pytest.approx(FETCH_S)),
            (7, 44, pytest.approx(FETCH_S)),
        ]
        assert [line["version"] for line in logged if line["event"] == "weights.refused"] == [6]

    play(scenario, nearby=nearby)


def test_while_weights_are_fetched_the_engine_goes_on_with_those_that_it_has() -> None:
    nearby, _ = fetching()

    async def scenario(scene: Scene) -> None:
        await scene.tell(WeightsPublished(5, "there", 44, ""), turn(1, 3))
        answers = [(await scene.rollout.receive()).message for _ in range(2)]
        assert [type(answer) for answer in answers] == [TurnGenerated, WeightsLoaded]

    play(scenario, nearby=nearby)


def test_a_generator_that_is_stopped_while_it_fetches_ends_at_once() -> None:
    nearby, fetched = fetching()

    async def scenario(scene: Scene) -> None:
        await scene.tell(WeightsPublished(5, "there", 44, ""))
        await asyncio.sleep(FETCH_S / 2)
        assert fetched == [5]

    play(scenario, nearby=nearby)


def test_a_generator_that_is_stopped_while_it_reports_ends_at_once() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.tell(turn(1, 10_000))
        await asyncio.sleep(0.3)

    play(scenario)  # a task that is left behind would be a deadlock, or a warning


def test_weights_that_cannot_be_loaded_are_not_answered_and_the_next_ones_are_loaded() -> None:
    async def scenario(scene: Scene) -> None:
        scene.engine.refused.append(5)
        with structlog.testing.capture_logs() as logged:
            await scene.tell(*(WeightsPublished(version, "", 4, "") for version in (5, 6)))
            answer = (await scene.rollout.receive()).message
        assert isinstance(answer, WeightsLoaded)
        assert (answer.version, scene.engine.loaded, scene.rollout.waiting) == (6, [6], 0)
        refused = [(entry["version"], entry["cause"]) for entry in logged if entry["event"] == "weights.refused"]
        assert refused == [(5, "half of them are missing")]

    play(scenario)


def test_of_trajectories_without_number_the_last_ones_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that comes a second time is not done twice, as long as its trajectory is remembered."""
    monkeypatch.setattr(generator, "_REMEMBERED", 2)

    async def scenario(scene: Scene) -> None:
        for trajectory_id in (1, 2, 3, 2, 1):
            await scene.tell(turn(trajectory_id, 1))
            await asyncio.sleep(1.0)
        assert scene.engine.asked == [1, 2, 3, 1]

    play(scenario)


def test_what_is_not_for_a_generator_is_said_and_changes_nothing() -> None:
    async def scenario(scene: Scene) -> None:
        with structlog.testing.capture_logs() as logged:
            await scene.tell(SessionEnded(1), turn(1, 1))
            assert isinstance((await scene.rollout.receive()).message, TurnGenerated)
        assert {"event": "message.misdirected", "kind": "SessionEnded", "log_level": "error"} in logged

    play(scenario)


def published(version: int) -> WeightsPublished:
    return WeightsPublished(version, "", 4, "")


def test_asked_to_rest_it_ends_its_turns_first_and_later_ones_wait_for_weights() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.tell(turn(1, 5))
        await asyncio.sleep(0.1)
        await scene.tell(RestRequested(1, 5))
        await asyncio.sleep(0.1)
        await scene.tell(turn(2, 5), turn(3, 5), TurnAborted(3, 1))
        answers = [(await scene.rollout.receive()).message for _ in range(2)]
        assert [type(answer) for answer in answers] == [TurnGenerated, EngineRested]
        assert (answers[1], scene.engine.released) == (EngineRested("generator-0", LIFE, RestRequested(1, 5)), [5])
        await asyncio.sleep(1)
        assert (scene.engine.asked, scene.rollout.waiting) == ([1], 0)
        await scene.tell(published(5))
        answers = [(await scene.rollout.receive()).message for _ in range(3)]
        assert {type(answer) for answer in answers} == {WeightsLoaded, TurnGenerated}
        assert (scene.engine.asked, scene.engine.loaded) == ([1, 2], [5])

    play(scenario)


def test_weights_of_before_the_rest_do_not_end_it_and_its_own_may_be_those_that_it_had() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.tell(RestRequested(1, 5), published(4), turn(1, 1))
        assert (await scene.rollout.receive()).message == EngineRested("generator-0", LIFE, RestRequested(1, 5))
        await asyncio.sleep(1)
        assert (scene.engine.loaded, scene.engine.asked, scene.rollout.waiting) == ([], [], 0)
        await scene.tell(RestRequested(2, -1), published(4))  # by a learner that has begun again
        assert (await scene.rollout.receive()).message == EngineRested("generator-0", LIFE, RestRequested(2, -1))
        await asyncio.sleep(1)
        assert (scene.engine.loaded, scene.engine.asked) == ([4], [1])

    play(scenario)


def test_a_rest_that_is_asked_for_twice_is_one() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.tell(RestRequested(1, 5), RestRequested(1, 5), published(5), RestRequested(1, 5), turn(1, 1))
        answers = [(await scene.rollout.receive()).message for _ in range(3)]
        assert [type(answer) for answer in answers] == [EngineRested, WeightsLoaded, TurnGenerated]
        assert len(scene.engine.released) == 1

    play(scenario)


def test_weights_that_cannot_be_read_do_not_end_a_rest() -> None:
    async def scenario(scene: Scene) -> None:
        scene.engine.refused = [5]
        await scene.tell(RestRequested(1, 5), published(5), turn(1, 1))
        await asyncio.sleep(1)
        assert (scene.engine.loaded, scene.engine.asked) == ([], [])
        await scene.tell(published(6))
        await asyncio.sleep(1)
        assert (scene.engine.loaded, scene.engine.asked) == ([6], [1])

    play(scenario)
