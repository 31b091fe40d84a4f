"""A generator whose engine is lost ends at once, says why, and tells nobody of its turns: their life of it is over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from actors.generator import Generator
from actors.losing_engine import Loss
from bus.in_process import Hub
from bus.messages import WeightsPublished
from bus.transport import Bus
from engine.contract import EngineFailure
from engine.sglang.client import SGLangClient
from engine.sglang.engine import SGLangEngine
from tests.actors.generators import LIFE, turn
from tests.engine.sglang.scenes import Attached, Way
from tests.engine.sglang.stand_in import Act, StandIn, answer, streaming

VERSION = 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 20}))
    return tmp_path


class Scene:
    def __init__(self, hub: Hub, attached: Attached, way: Way, server: StandIn) -> None:
        self.attached, self.way, self.server = attached, way, server
        self.rollout, self.arbiter = hub.join("rollout-0", 100), hub.join("head", 100)

    async def ask(self, number: int) -> None:
        await self.rollout.send("generator-0", turn(number))


def end_of_generator(
    model: Path, act: Act, scenario: Callable[[Scene], Awaitable[None]], failure: EngineFailure | None = None
) -> tuple[str, int]:
    """Why it ended, and how many messages the rollout had got."""

    async def generate(bus: Bus, attached: Attached, way: Way) -> None:
        loss = Loss()
        engine = SGLangEngine(
            attached,
            way,
            model=model,
            sequence_tokens=100,
            version=VERSION,
            connect=lambda url: SGLangClient(url, back_off_s=(0.0,)),
            lost=loss.note,
        )
        with loss.raised():
            await Generator("generator-0", bus, engine, "head/arbiter", LIFE).run()

    async def play() -> tuple[str, int]:
        server, hub = StandIn(act), Hub()
        async with server.serving() as url:
            attached, way = Attached(url), Way(failure)
            scene = Scene(hub, attached, way, server)
            generating = asyncio.create_task(generate(hub.join("generator-0", 100), attached, way))
            await scene.arbiter.receive()  # it joins
            await scenario(scene)
            with pytest.raises(EngineFailure) as raised:
                await generating
            assert attached.closed
            return str(raised.value), scene.rollout.waiting

    return asyncio.run(play())


def test_a_server_that_dies_ends_the_generator_and_no_turn_is_said_to_have_failed(model: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.ask(1)
        await scene.ask(2)
        await scene.server.came.wait()
        scene.attached.died.set_result("it lost its process sglang::scheduler")

    said, answers = end_of_generator(model, streaming(asyncio.Event()), scenario)
    assert said == "the server ended: it lost its process sglang::scheduler"
    assert answers == 0


def test_an_idle_one_does_not_wait_for_a_turn_to_notice(model: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.attached.died.set_result("out of memory")

    assert end_of_generator(model, streaming(), scenario) == ("the server ended: out of memory", 0)


def test_a_connection_that_breaks_before_the_death_is_known_is_no_failure_of_the_turn(model: Path) -> None:
    """The server is gone, and the kernel says so to whoever reads its sockets first."""

    async def scenario(scene: Scene) -> None:
        gone = asyncio.Event()

        async def silent(client: SGLangClient) -> bool:
            gone.set()
            return False

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SGLangClient, "answers", silent)
            await scene.ask(1)
            await gone.wait()
            await asyncio.sleep(0)
            scene.attached.died.set_result("killed")
            await asyncio.sleep(0)

    begun = streaming(lambda body: answer(body, [4]), then="broken")
    assert end_of_generator(model, begun, scenario) == ("the server ended: killed", 0)


def test_weights_that_are_half_loaded_end_it_too(model: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.ask(1)
        await scene.server.came.wait()
        await scene.rollout.send("generator-0", WeightsPublished(VERSION + 1, "/nowhere", 0, ""))

    failure = EngineFailure("some are loaded")
    said, answers = end_of_generator(model, streaming(asyncio.Event()), scenario, failure)
    assert said == "the server's weights are not whole: some are loaded"
    assert answers == 0


def test_to_be_cancelled_is_no_loss() -> None:
    async def play() -> None:
        async def serve() -> None:
            with Loss().raised():
                await asyncio.Event().wait()

        serving = asyncio.create_task(serve())
        await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(play())


def test_failures_of_the_engine_in_a_group_are_one_and_other_errors_stay_what_they_are() -> None:
    async def play(error: ExceptionGroup) -> None:
        with Loss().raised():
            raise error

    inner = ExceptionGroup("tasks", [EngineFailure("it broke"), EngineFailure("it broke")])
    with pytest.raises(EngineFailure, match=r"^it broke; out of memory$"):
        asyncio.run(play(ExceptionGroup("tasks", [inner, EngineFailure("out of memory")])))
    with pytest.raises(ExceptionGroup):
        asyncio.run(play(ExceptionGroup("tasks", [EngineFailure("it broke"), KeyError("a bug")])))
