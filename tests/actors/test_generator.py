"""The generator with a scripted engine: turns, cache releases, weights and sleep."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from msgspec.structs import replace

from actors import generator
from actors.generator import FetchToNode
from bus.messages import (
    CacheReleased,
    EngineAsleep,
    EngineSleepRequested,
    LeaseReleased,
    SessionEnded,
    TurnAborted,
    TurnFailed,
    TurnGenerated,
    WeightsLoaded,
    WeightsPublished,
)
from engine.contract import WeightsRefused
from tests.actors.generators import INCARNATION, STEP_S, Scene, play, turn


def test_an_answer_has_the_lease_of_its_request() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(turn(1, 3, lease=7))
        answer = (await scene.rollout.receive()).message
        assert isinstance(answer, TurnGenerated)
        assert (answer.turn, answer.lease, answer.finish) == (2, 7, "length")
        await scene.send(turn(2, lease=8, first=666))
        assert (await scene.rollout.receive()).message == TurnFailed(2, 2, 8, "engine: out of memory")

    play(scenario)


def test_a_cache_is_released_at_the_trajectorys_end_or_by_the_arbiter_but_not_under_a_later_lease() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(turn(1, 1), turn(2, 1, lease=4), turn(3, 1))
        await asyncio.sleep(0.01)  # messages of the control lane would overtake them
        await scene.send(LeaseReleased(1, 3), CacheReleased(2, 3), CacheReleased(3, 1))
        await asyncio.sleep(1)
        assert scene.engine.released_caches == [1, 3]

    play(scenario)


def test_duplicate_turns_and_turns_after_the_trajectorys_end_are_ignored() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(turn(1, 1, lease=2), turn(1, 1, lease=2), turn(1, 1))
        await asyncio.sleep(1)
        await scene.send(turn(1, 1, lease=2), turn(1, 1, lease=3))
        await asyncio.sleep(1)
        assert scene.engine.generated == [1, 1]
        await scene.send(LeaseReleased(1, 4), turn(1, 1, lease=3), turn(1, 1, lease=4), CacheReleased(1, 3))
        await asyncio.sleep(1)
        assert scene.engine.generated == [1, 1]
        assert scene.engine.released_caches == [1]
        assert scene.rollout.waiting == 2

    play(scenario)


def test_a_turn_with_a_lease_of_another_incarnation_fails_immediately() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(turn(1, lease=7, incarnation=INCARNATION - 1))
        cause = "engine left: the lease is of incarnation 2, this is incarnation 3"
        assert (await scene.rollout.receive()).message == TurnFailed(1, 2, 7, cause)
        assert scene.engine.generated == []

    play(scenario)


def test_a_turn_aborted_before_the_engine_has_it_is_answered_without_tokens() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(turn(1), TurnAborted(1, 1))  # both have arrived before the generator runs
        answer = (await scene.rollout.receive()).message
        assert answer == TurnGenerated(1, 2, 1, b"", b"", b"", "abort")
        assert scene.engine.generated == []
        await scene.send(turn(1, 1, lease=2))  # the next turn is not aborted
        assert isinstance((await scene.rollout.receive()).message, TurnGenerated)
        assert scene.engine.generated == [1]

    play(scenario)


def test_an_abort_reaches_the_engine_only_under_the_turns_lease() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(turn(1, lease=2))
        await asyncio.sleep(0.5)
        await scene.send(TurnAborted(1, 1), TurnAborted(2, 1))
        await asyncio.sleep(0.1)
        assert scene.engine.aborted == []
        await scene.send(TurnAborted(1, 2))
        await asyncio.sleep(0.1)
        assert scene.engine.aborted == [1]

    play(scenario)


def test_duplicate_and_older_weights_are_acknowledged_but_not_loaded() -> None:
    def published(version: int) -> WeightsPublished:
        return WeightsPublished(version, "", 4, "")

    async def scenario(scene: Scene) -> None:
        await scene.send(*(published(version) for version in (5, 6, 5, 6, 3)))
        answers = [(await scene.rollout.receive()).message for _ in range(5)]
        assert [answer.version for answer in answers if isinstance(answer, WeightsLoaded)] == [5, 6, 5, 6, 3]
        assert scene.engine.loaded_versions == [5, 6]

    play(scenario)


def test_nothing_is_generated_before_the_first_weights_are_loaded() -> None:
    """A turn may overtake the first weights of a new engine; it can be aborted while it waits."""

    async def scenario(scene: Scene) -> None:
        await scene.send(turn(1, 2), turn(2, 2), TurnAborted(2, 1))
        await asyncio.sleep(5.0)
        assert scene.engine.generated == []
        await scene.send(*(WeightsPublished(version, "", 4, "") for version in (0, 1, 2)))
        await asyncio.sleep(2.5 * STEP_S)
        assert (scene.engine.generated, scene.engine.version) == (
            [],
            1,
        )  # older weights than the announced ones are not enough
        answers = [(await scene.rollout.receive()).message for _ in range(5)]
        assert scene.engine.generated == [1]
        assert [answer.finish for answer in answers if isinstance(answer, TurnGenerated)] == ["abort", "length"]

    play(scenario, version=-1)


FETCH_S = 3.0


def make_fetch() -> tuple[FetchToNode, list[int]]:
    """A fetch that takes FETCH_S, and the fetched versions; version 6 is missing."""
    fetched: list[int] = []

    async def fetch(published: WeightsPublished) -> WeightsPublished:
        fetched.append(published.version)
        await asyncio.sleep(FETCH_S)
        if published.version == 6:
            raise WeightsRefused("missing")
        return replace(published, path=f"here/{published.version}")

    return fetch, fetched


def test_weights_of_another_machine_are_fetched_once_and_loaded_from_the_local_copy() -> None:
    fetch, fetched = make_fetch()

    async def scenario(scene: Scene) -> None:
        with structlog.testing.capture_logs() as logged:
            await scene.send(*(WeightsPublished(version, f"there/{version}", 44, "") for version in (5, 5, 6, 7, 4)))
            answers = [(await scene.rollout.receive()).message for _ in range(4)]
        assert [answer.version for answer in answers if isinstance(answer, WeightsLoaded)] == [5, 5, 7, 4]
        assert (fetched, scene.engine.loaded_paths) == ([5, 6, 7], ["here/5", "here/7"])
        lines = [line for line in logged if line["event"] == "weights.fetched"]
        assert [(line["version"], line["bytes"], line["fetch_s"]) for line in lines] == [
            (5, 44, pytest.approx(FETCH_S)),
            (7, 44, pytest.approx(FETCH_S)),
        ]
        assert [line["version"] for line in logged if line["event"] == "weights.refused"] == [6]

    play(scenario, fetch=fetch)


def test_the_engine_generates_while_weights_are_fetched() -> None:
    fetch, _ = make_fetch()

    async def scenario(scene: Scene) -> None:
        await scene.send(WeightsPublished(5, "there", 44, ""), turn(1, 3))
        answers = [(await scene.rollout.receive()).message for _ in range(2)]
        assert [type(answer) for answer in answers] == [TurnGenerated, WeightsLoaded]

    play(scenario, fetch=fetch)


def test_shutdown_cancels_a_fetch() -> None:
    fetch, fetched = make_fetch()

    async def scenario(scene: Scene) -> None:
        await scene.send(WeightsPublished(5, "there", 44, ""))
        await asyncio.sleep(FETCH_S / 2)
        assert fetched == [5]

    play(scenario, fetch=fetch)


def test_shutdown_cancels_the_load_reports() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(turn(1, 10_000))
        await asyncio.sleep(0.3)

    play(scenario)  # a leaked task would be a deadlock or a warning


def test_refused_weights_are_not_acknowledged_and_the_next_ones_are_loaded() -> None:
    async def scenario(scene: Scene) -> None:
        scene.engine.refused.append(5)
        with structlog.testing.capture_logs() as logged:
            await scene.send(*(WeightsPublished(version, "", 4, "") for version in (5, 6)))
            answer = (await scene.rollout.receive()).message
        assert isinstance(answer, WeightsLoaded)
        assert (answer.version, scene.engine.loaded_versions, scene.rollout.waiting) == (6, [6], 0)
        refused = [(entry["version"], entry["cause"]) for entry in logged if entry["event"] == "weights.refused"]
        assert refused == [(5, "half of them are missing")]

    play(scenario)


def test_only_the_leases_of_the_latest_trajectories_are_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A duplicate turn is ignored while the lease of its trajectory is tracked."""
    monkeypatch.setattr(generator, "_MAX_TRACKED_LEASES", 2)

    async def scenario(scene: Scene) -> None:
        for trajectory_id in (1, 2, 3, 2, 1):
            await scene.send(turn(trajectory_id, 1))
            await asyncio.sleep(1.0)
        assert scene.engine.generated == [1, 2, 3, 1]

    play(scenario)


def test_misdirected_messages_are_logged_and_dropped() -> None:
    async def scenario(scene: Scene) -> None:
        with structlog.testing.capture_logs() as logged:
            await scene.send(SessionEnded(1), turn(1, 1))
            assert isinstance((await scene.rollout.receive()).message, TurnGenerated)
        assert {"event": "message.misdirected", "kind": "SessionEnded", "log_level": "error"} in logged

    play(scenario)


def published(version: int) -> WeightsPublished:
    return WeightsPublished(version, "", 4, "")


def test_a_sleep_request_finishes_turns_and_later_turns_wait_for_weights() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(turn(1, 5))
        await asyncio.sleep(0.1)
        await scene.send(EngineSleepRequested(1, 5))
        await asyncio.sleep(0.1)
        await scene.send(turn(2, 5), turn(3, 5), TurnAborted(3, 1))
        answers = [(await scene.rollout.receive()).message for _ in range(2)]
        assert [type(answer) for answer in answers] == [TurnGenerated, EngineAsleep]
        assert (answers[1], scene.engine.sleeps) == (
            EngineAsleep("generator-0", INCARNATION, EngineSleepRequested(1, 5)),
            [5],
        )
        await asyncio.sleep(1)
        assert (scene.engine.generated, scene.rollout.waiting) == ([1], 0)
        await scene.send(published(5))
        answers = [(await scene.rollout.receive()).message for _ in range(3)]
        assert {type(answer) for answer in answers} == {WeightsLoaded, TurnGenerated}
        assert (scene.engine.generated, scene.engine.loaded_versions) == ([1, 2], [5])

    play(scenario)


def test_only_weights_of_the_requested_version_or_newer_end_a_sleep() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(EngineSleepRequested(1, 5), published(4), turn(1, 1))
        assert (await scene.rollout.receive()).message == EngineAsleep(
            "generator-0", INCARNATION, EngineSleepRequested(1, 5)
        )
        await asyncio.sleep(1)
        assert (scene.engine.loaded_versions, scene.engine.generated, scene.rollout.waiting) == ([], [], 0)
        await scene.send(EngineSleepRequested(2, -1), published(4))  # by a restarted learner
        assert (await scene.rollout.receive()).message == EngineAsleep(
            "generator-0", INCARNATION, EngineSleepRequested(2, -1)
        )
        await asyncio.sleep(1)
        assert (scene.engine.loaded_versions, scene.engine.generated) == ([4], [1])

    play(scenario)


def test_a_duplicate_sleep_request_is_ignored() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.send(
            EngineSleepRequested(1, 5), EngineSleepRequested(1, 5), published(5), EngineSleepRequested(1, 5), turn(1, 1)
        )
        answers = [(await scene.rollout.receive()).message for _ in range(3)]
        assert [type(answer) for answer in answers] == [EngineAsleep, WeightsLoaded, TurnGenerated]
        assert len(scene.engine.sleeps) == 1

    play(scenario)


def test_refused_weights_do_not_end_a_sleep() -> None:
    async def scenario(scene: Scene) -> None:
        scene.engine.refused = [5]
        await scene.send(EngineSleepRequested(1, 5), published(5), turn(1, 1))
        await asyncio.sleep(1)
        assert (scene.engine.loaded_versions, scene.engine.generated) == ([], [])
        await scene.send(published(6))
        await asyncio.sleep(1)
        assert (scene.engine.loaded_versions, scene.engine.generated) == ([6], [1])

    play(scenario)
