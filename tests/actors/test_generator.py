"""The generator around an engine that does as it is told: what it answers, forgets, and reports of its load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
import structlog
from msgspec.structs import replace

from actors import generator
from actors.generator import Generator, Nearby
from bus.in_process import Hub
from bus.messages import (
    AnyMessage,
    CacheReleased,
    EngineJoined,
    EngineLoadReported,
    LeaseReleased,
    SessionEnded,
    Shutdown,
    TurnAborted,
    TurnFailed,
    TurnGenerated,
    TurnRequested,
    WeightsLoaded,
    WeightsPublished,
)
from engine.contract import Capacity, EngineFailure, EngineLoad, Generation, GenerationRequest, WeightsRefused
from policies.record import ids_to_bytes
from tests.simulation.clock import run_virtually

STEP_S = 0.1


class ScriptedEngine:
    """Implements engine.contract.Engine: a token takes STEP_S; a sequence that begins with 666 breaks it."""

    def __init__(self, version: int = 4) -> None:
        self.version = version
        self.steps = 0
        self.running = 0
        self.forgotten: list[int] = []
        self.asked: list[int] = []  # sequences
        self.stopped: list[int] = []
        self.loaded: list[int] = []  # versions
        self.paths: list[str] = []  # of them
        self.refused: list[int] = []

    async def start(self) -> Capacity:
        return Capacity(1024, 16, 512)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked.append(request.sequence_id)
        if request.token_ids[0] == 666:
            raise EngineFailure("out of memory")
        self.running += 1
        for _ in range(request.max_new_tokens):
            await asyncio.sleep(STEP_S)
            self.steps += 1
        self.running -= 1
        count = request.max_new_tokens
        return Generation(
            np.full(count, 7, np.int32), np.zeros(count, np.float32), np.full(count, 4, np.int32), "length"
        )

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=self.running,
            waiting=0,
            used_tokens=16 * self.running,
            cached_tokens=0,
            decode_steps=self.steps,
            generated_tokens=0,
            prefilled_tokens=0,
            recomputed_tokens=0,
            evicted_tokens=0,
            preempted=0,
            busy_s=self.steps * STEP_S,
        )

    def abort(self, sequence_id: int) -> None:
        self.stopped.append(sequence_id)

    def forget(self, sequence_id: int) -> None:
        self.forgotten.append(sequence_id)

    async def load_weights(self, weights: WeightsPublished) -> None:
        await asyncio.sleep(STEP_S)
        if weights.version in self.refused:
            raise WeightsRefused("half of them are missing")
        self.loaded.append(weights.version)
        self.paths.append(weights.path)
        self.version = weights.version

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


LIFE = 3


def turn(tid: int, new_tokens: int = 10, *, lease: int = 1, first: int = 1, life: int = LIFE) -> TurnRequested:
    return TurnRequested(tid, 2, lease, ids_to_bytes([first, 2]), new_tokens, 1.0, 1.0, 0, (), 5, life)


class Scene:
    def __init__(self, hub: Hub, engine: ScriptedEngine) -> None:
        self.engine, self.version = engine, engine.version
        self.arbiter, self.rollout = hub.join("head", 100), hub.join("rollout-0", 100)
        self.reports: list[tuple[float, EngineLoadReported]] = []

    async def tell(self, *messages: AnyMessage) -> None:
        for message in messages:
            await self.rollout.send("generator-0", message)

    async def listen(self) -> None:
        assert (await self.arbiter.receive()).message == EngineJoined("generator-0", 1024, 16, self.version, LIFE)
        while True:
            message = (await self.arbiter.receive()).message
            assert isinstance(message, EngineLoadReported)
            self.reports.append((round(asyncio.get_running_loop().time(), 3), message))


@asynccontextmanager
async def scene(version: int = 4, nearby: Nearby | None = None) -> AsyncIterator[Scene]:
    hub, engine = Hub(), ScriptedEngine(version)
    each = Scene(hub, engine)
    clock = asyncio.get_running_loop().time
    actor = Generator("generator-0", hub.join("generator-0", 100), engine, "head/arbiter", LIFE, clock, nearby=nearby)
    running = asyncio.create_task(actor.run())
    listening = asyncio.create_task(each.listen())
    yield each
    await each.tell(Shutdown())
    await running
    listening.cancel()


def play(scenario: Callable[[Scene], Awaitable[None]], version: int = 4, nearby: Nearby | None = None) -> None:
    async def whole() -> None:
        async with scene(version, nearby) as each:
            await scenario(each)

    run_virtually(whole())


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
