"""A generator with a scripted engine handles turns, cache releases, weights, sleep and load reports."""

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from asterism.actors.engines.weight_loading import WeightLoader
from asterism.actors.generator import Generator
from asterism.bus import messages as msg
from asterism.bus.transport.in_process import Hub
from asterism.engine import prefix_tracker
from asterism.engine.contract import EngineFailure
from tests.actors.generators import FETCH_S, INCARNATION, STEP_S, Scene, ScriptedEngine, open_scene, turn


@pytest.fixture
def scene() -> AbstractAsyncContextManager[Scene]:
    return open_scene()


@pytest.fixture
def remote_scene() -> AbstractAsyncContextManager[Scene]:
    return open_scene(is_remote=True)


def published(version: int, incarnation: int = INCARNATION) -> msg.WeightsPublished:
    return msg.WeightsPublished(version, f"there/{version}", 44, "", incarnation)


async def test_an_answer_has_the_lease_of_its_request(scene: Scene) -> None:
    await scene.send(turn(1, 3, lease=7))
    answer = await scene.receive_turn()
    assert (answer.turn, answer.lease, answer.finish) == (2, 7, "length")
    await scene.send(turn(2, lease=8, first=666))
    assert await scene.receive(1) == [msg.TurnFailed(2, 2, 8, "engine: out of memory")]


async def test_trajectory_ends_and_the_arbiter_release_caches_except_those_of_later_leases(scene: Scene) -> None:
    await scene.send(turn(1, 1), turn(2, 1, lease=4), turn(3, 1))
    await asyncio.sleep(0.01)  # otherwise the control lane overtakes these turns
    await scene.send(msg.LeaseReleased(1, 3), msg.CacheReleased(2, 3), msg.CacheReleased(3, 1))
    await asyncio.sleep(1)
    assert scene.engine.released_caches == [1, 3]


async def test_duplicate_turns_and_turns_after_the_trajectorys_end_are_ignored(scene: Scene) -> None:
    await scene.send(turn(1, 1, lease=2), turn(1, 1, lease=2), turn(1, 1))
    await asyncio.sleep(1)
    await scene.send(turn(1, 1, lease=2), turn(1, 1, lease=3))
    await asyncio.sleep(1)
    assert scene.engine.generated == [1, 1]
    await scene.send(msg.LeaseReleased(1, 4), turn(1, 1, lease=3), turn(1, 1, lease=4), msg.CacheReleased(1, 3))
    await asyncio.sleep(1)
    assert scene.engine.generated == [1, 1]
    assert scene.engine.released_caches == [1]
    assert scene.rollout.waiting == 2


async def test_a_turn_with_a_lease_of_another_incarnation_fails_immediately(scene: Scene) -> None:
    await scene.send(turn(1, lease=7, incarnation=INCARNATION - 1))
    cause = "engine left: the lease is of incarnation 2, this is incarnation 3"
    assert await scene.receive(1) == [msg.TurnFailed(1, 2, 7, cause)]
    assert scene.engine.generated == []


async def test_a_turn_that_is_aborted_before_it_starts_is_answered_without_tokens(scene: Scene) -> None:
    await scene.send(turn(1), msg.TurnAborted(1, 1))  # both messages arrive before the generator runs
    answer = (await scene.rollout.receive()).message
    assert answer == msg.TurnGenerated(1, 2, 1, b"", b"", b"", "abort")
    assert scene.engine.generated == []
    await scene.send(turn(1, 1, lease=2))  # the abort does not affect the next turn
    await scene.receive_turn()
    assert scene.engine.generated == [1]


async def test_an_abort_reaches_the_engine_only_under_the_turns_lease(scene: Scene) -> None:
    await scene.send(turn(1, lease=2))
    await asyncio.sleep(0.5)
    await scene.send(msg.TurnAborted(1, 1), msg.TurnAborted(2, 1))
    await asyncio.sleep(0.1)
    assert scene.engine.aborted == []
    await scene.send(msg.TurnAborted(1, 2))
    await asyncio.sleep(0.1)
    assert scene.engine.aborted == [1]


# ---------------------------------------------------------------- weights


async def test_duplicate_and_older_weights_are_acknowledged_but_not_loaded(scene: Scene) -> None:
    await scene.send(*(published(version) for version in (5, 6, 5, 6, 3)))
    assert await scene.receive_loaded(5) == [5, 6, 5, 6, 3]
    assert scene.engine.loaded_versions == [5, 6]


async def test_a_retrained_version_with_other_bits_is_loaded_again(scene: Scene) -> None:
    again = replace(published(5), digest="ab" * 16)
    await scene.send(published(5), again, again)
    assert await scene.receive_loaded(3) == [5, 5, 5]
    assert scene.engine.loaded_versions == [5, 5]


async def test_an_engine_joins_the_arbiter_when_it_holds_the_published_weights() -> None:
    hub, engine = Hub(), ScriptedEngine(-1)
    head = hub.join("head", 100)
    bus = hub.join("generator-0", 100)
    generator = Generator("generator-0", bus, engine, "head/arbiter", INCARNATION, recipe="head/recipe")
    running = asyncio.create_task(generator.run())
    joined = await head.receive()
    assert (joined.to, joined.message) == ("head/recipe", msg.EngineJoined("generator-0", 1024, 16, -1, INCARNATION))
    await asyncio.sleep(5.0)
    assert head.waiting == 0
    await head.send("generator-0", published(7))
    joined, loaded = await head.receive(), await head.receive()
    assert (joined.to, joined.message) == ("head/arbiter", msg.EngineJoined("generator-0", 1024, 16, 7, INCARNATION))
    assert isinstance(loaded.message, msg.WeightsLoaded)
    await head.send("generator-0", msg.Shutdown())
    await running


async def test_a_stalled_load_of_weights_ends_the_generator_with_the_name_of_the_stage() -> None:
    class StalledEngine(ScriptedEngine):
        async def load_weights(self, weights: msg.WeightsPublished) -> None:
            await asyncio.Event().wait()

    hub = Hub()
    head, bus = hub.join("head", 100), hub.join("generator-0", 100)
    engine = StalledEngine(4)
    loader = WeightLoader(engine, timeout_s=30.0)
    generator = Generator("generator-0", bus, engine, "head/arbiter", INCARNATION, loader=loader)
    await head.send("generator-0", published(5))
    with pytest.raises(ExceptionGroup) as raised:
        await generator.run()
    (failure,) = raised.value.exceptions
    while isinstance(failure, ExceptionGroup):
        (failure,) = failure.exceptions
    assert isinstance(failure, EngineFailure)
    assert "the engine has no weights of version 5" in str(failure)
    assert "after engine.load_timeout_s = 30 s: the load into the engine stalls" in str(failure)


async def test_nothing_is_generated_before_the_newest_announced_weights_are_loaded() -> None:
    """A turn may overtake the first weights of a new engine; it can be aborted while it waits."""
    async with open_scene(version=-1) as scene:
        await scene.send(turn(1, 2), turn(2, 2), msg.TurnAborted(2, 1))
        await asyncio.sleep(5.0)
        assert scene.engine.generated == []
        await scene.send(*(published(version) for version in (0, 1, 2)))
        await asyncio.sleep(2.5 * STEP_S)
        assert (scene.engine.generated, scene.engine.version) == ([], 1)
        answers = await scene.receive(5)
        assert scene.engine.generated == [1]
        assert [answer.finish for answer in answers if isinstance(answer, msg.TurnGenerated)] == ["abort", "length"]


async def test_weights_sent_to_an_earlier_incarnation_are_ignored() -> None:
    """The bus repeats unconfirmed messages to a restarted engine, also after the run has synced newer weights."""
    async with open_scene(version=-1) as scene:
        with capture_logs() as logged:
            await scene.send(published(0, INCARNATION - 1), turn(1, 1))
            await asyncio.sleep(1.0)
        assert (scene.engine.loaded_versions, scene.engine.generated, scene.rollout.waiting) == ([], [], 0)
        ignored = {"event": "weights.other_incarnation_ignored", "version": 0, "incarnation": INCARNATION - 1}
        assert {**ignored, "log_level": "warning"} in logged
        await scene.send(published(1))
        assert {type(answer) for answer in await scene.receive(2)} == {msg.WeightsLoaded, msg.TurnGenerated}
        assert (scene.engine.loaded_versions, scene.engine.generated) == ([1], [1])


async def test_weights_of_another_machine_are_fetched_once_and_loaded_from_the_local_copy(remote_scene: Scene) -> None:
    with capture_logs() as logged:
        await remote_scene.send(*(published(version) for version in (5, 5, 6, 7, 4)))
        assert await remote_scene.receive_loaded(4) == [5, 5, 7, 4]
    assert (remote_scene.fetched, remote_scene.engine.loaded_paths) == ([5, 6, 7], ["here/5", "here/7"])
    lines = [line for line in logged if line["event"] == "weights.fetched"]
    assert [(line["version"], line["bytes"], line["fetch_s"]) for line in lines] == [
        (5, 44, pytest.approx(FETCH_S)),
        (7, 44, pytest.approx(FETCH_S)),
    ]
    assert [line["version"] for line in logged if line["event"] == "weights.refused"] == [6]


async def test_the_engine_generates_while_weights_are_fetched(remote_scene: Scene) -> None:
    await remote_scene.send(published(5), turn(1, 3))
    answers = await remote_scene.receive(2)
    assert [type(answer) for answer in answers] == [msg.TurnGenerated, msg.WeightsLoaded]


async def test_shutdown_cancels_a_fetch(remote_scene: Scene) -> None:
    await remote_scene.send(published(5))
    await asyncio.sleep(FETCH_S / 2)
    assert remote_scene.fetched == [5]


async def test_shutdown_cancels_the_load_reports(scene: Scene) -> None:
    await scene.send(turn(1, 10_000))
    await asyncio.sleep(0.3)


async def test_refused_weights_are_not_acknowledged_and_the_next_ones_are_loaded(scene: Scene) -> None:
    scene.engine.refused.append(5)
    with capture_logs() as logged:
        await scene.send(*(published(version) for version in (5, 6)))
        answer = (await scene.rollout.receive()).message
    assert isinstance(answer, msg.WeightsLoaded)
    assert (answer.version, scene.engine.loaded_versions, scene.rollout.waiting) == (6, [6], 0)
    refused = [(entry["version"], entry["cause"]) for entry in logged if entry["event"] == "weights.refused"]
    assert refused == [(5, "half of the weights are missing")]


async def test_the_recorder_receives_the_counters_of_a_step_before_its_weights_are_acknowledged(scene: Scene) -> None:
    await scene.send(turn(1, 5))
    await scene.receive_turn()
    await scene.send(published(5))
    assert isinstance((await scene.rollout.receive()).message, msg.WeightsLoaded)
    assert [(load.version, load.decode_steps, load.incarnation) for load in scene.recorded] == [(5, 5, INCARNATION)]


async def test_only_leases_of_the_latest_trajectories_are_kept(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A duplicate turn is ignored while the lease of its trajectory is tracked."""
    monkeypatch.setattr(prefix_tracker, "MAX_TRACKED", 2)
    for trajectory_id in (1, 2, 3, 2, 1):
        await scene.send(turn(trajectory_id, 1))
        await asyncio.sleep(1.0)
    assert scene.engine.generated == [1, 2, 3, 1]


async def test_misdirected_messages_are_logged_and_dropped(scene: Scene) -> None:
    with capture_logs() as logged:
        await scene.send(msg.SessionEnded(1), turn(1, 1))
        await scene.receive_turn()
    assert {"event": "message.misdirected", "kind": "SessionEnded", "log_level": "error"} in logged


# ---------------------------------------------------------------- sleep


def asleep(learner_incarnation: int, version: int) -> msg.EngineAsleep:
    return msg.EngineAsleep("generator-0", INCARNATION, msg.EngineSleepRequested(learner_incarnation, version))


async def test_a_sleep_request_finishes_turns_and_later_turns_wait_for_weights(scene: Scene) -> None:
    await scene.send(turn(1, 5))
    await asyncio.sleep(0.1)
    await scene.send(msg.EngineSleepRequested(1, 5))
    await asyncio.sleep(0.1)
    await scene.send(turn(2, 5), turn(3, 5), msg.TurnAborted(3, 1))
    answers = await scene.receive(2)
    assert isinstance(answers[0], msg.TurnGenerated)
    assert (answers[1], scene.engine.sleeps) == (asleep(1, 5), [5])
    await asyncio.sleep(1)
    assert (scene.engine.generated, scene.rollout.waiting) == ([1], 0)
    await scene.send(published(5))
    answers = await scene.receive(3)
    assert {type(answer) for answer in answers} == {msg.WeightsLoaded, msg.TurnGenerated}
    assert (scene.engine.generated, scene.engine.loaded_versions) == ([1, 2], [5])


async def test_only_weights_that_are_new_enough_end_a_sleep(scene: Scene) -> None:
    await scene.send(msg.EngineSleepRequested(1, 5), published(4), turn(1, 1))
    assert await scene.receive(1) == [asleep(1, 5)]
    await asyncio.sleep(1)
    assert (scene.engine.loaded_versions, scene.engine.generated, scene.rollout.waiting) == ([], [], 0)
    await scene.send(msg.EngineSleepRequested(2, -1), published(4))  # the request of a restarted learner
    assert await scene.receive(1) == [asleep(2, -1)]
    await asyncio.sleep(1)
    assert (scene.engine.loaded_versions, scene.engine.generated) == ([4], [1])


async def test_a_duplicate_sleep_request_is_ignored(scene: Scene) -> None:
    await scene.send(
        msg.EngineSleepRequested(1, 5),
        msg.EngineSleepRequested(1, 5),
        published(5),
        msg.EngineSleepRequested(1, 5),
        turn(1, 1),
    )
    answers = await scene.receive(3)
    assert [type(answer) for answer in answers] == [msg.EngineAsleep, msg.WeightsLoaded, msg.TurnGenerated]
    assert len(scene.engine.sleeps) == 1


async def test_refused_weights_do_not_end_a_sleep(scene: Scene) -> None:
    scene.engine.refused = [5]
    await scene.send(msg.EngineSleepRequested(1, 5), published(5), turn(1, 1))
    await asyncio.sleep(1)
    assert (scene.engine.loaded_versions, scene.engine.generated) == ([], [])
    await scene.send(published(6))
    await asyncio.sleep(1)
    assert (scene.engine.loaded_versions, scene.engine.generated) == ([6], [1])


# ---------------------------------------------------------------- load reports


async def test_a_changing_load_is_reported_four_times_a_second_and_once_when_it_settles(scene: Scene) -> None:
    await asyncio.sleep(5)
    await scene.send(turn(1, 11))  # takes 1.1 s
    await asyncio.sleep(20)
    assert [at for at, _ in scene.reports] == [5.25, 5.5, 5.75, 6.0, 6.25]
    assert [report.running for _, report in scene.reports] == [1, 1, 1, 1, 0]
    assert scene.reports[-1][1].decode_steps == 11
    assert scene.reports[-1][1].busy_s == pytest.approx(1.1)
    assert (scene.reports[-1][1].version, scene.reports[-1][1].incarnation) == (4, INCARNATION)
    assert scene.reports[-1][1].evicted_tokens == 0


async def test_an_unchanged_load_with_a_turn_in_flight_is_not_reported(scene: Scene) -> None:
    await scene.send(turn(1, 0))  # nothing to generate: the load never changes
    await asyncio.sleep(3)
    assert len(scene.reports) == 1
    await scene.send(turn(2, 1))
    await asyncio.sleep(3)
    assert [report.decode_steps for _, report in scene.reports] == [0, 1]


async def test_each_report_is_logged(scene: Scene) -> None:
    with capture_logs() as logged:
        await scene.send(turn(1, 1))
        await asyncio.sleep(2)
    lines = [line for line in logged if line["event"] == "engine.load"]
    assert [line["decode_steps"] for line in lines] == [report.decode_steps for _, report in scene.reports] == [1]


async def test_the_work_after_the_last_report_is_logged_at_the_end() -> None:
    with capture_logs() as logged:
        async with open_scene() as scene:
            await scene.send(turn(1, 10))
            await asyncio.sleep(0.65)  # a report comes at 0.5 s
    assert [report.decode_steps for _, report in scene.reports] == [2, 4]
    assert [line["decode_steps"] for line in logged if line["event"] == "engine.load"] == [2, 4, 6]
