"""A generator that lost its engine ends immediately with the cause, and reports no failed turns."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from asterism.actors.engines.engine_gone import EngineGoneSignal
from asterism.actors.generator import Generator
from asterism.bus.bus import Bus
from asterism.bus.messages import WeightsPublished
from asterism.bus.transport.in_process import Hub
from asterism.engine.contract import EngineFailure, Generation, GenerationRequest
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.sglang_engine import SGLangEngine
from tests.actors.generators import INCARNATION, ScriptedEngine, turn
from tests.engine.sglang.fake_server import FakeServer, Handler, make_response, streaming
from tests.engine.sglang.scenes import FakeServerHandle, FakeTransport
from tests.engine.tiny_models import small_config

pytestmark = pytest.mark.real_clock

VERSION = 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(small_config(vocab_size=20).to_hf()))
    return tmp_path


class Scene:
    def __init__(self, hub: Hub, handle: FakeServerHandle, transport: FakeTransport, server: FakeServer) -> None:
        self.handle, self.transport, self.server = handle, transport, server
        self.rollout, self.arbiter = hub.join("rollout-0", 100), hub.join("head", 100)

    async def ask(self, number: int) -> None:
        await self.rollout.send("generator-0", turn(number))


async def run_until_lost(
    model: Path, act: Handler, scenario: Callable[[Scene], Awaitable[None]], failure: EngineFailure | None = None
) -> tuple[str, int]:
    """Return the cause of the generator's end, and the number of messages that wait for the rollout."""

    async def generate(bus: Bus, handle: FakeServerHandle, transport: FakeTransport) -> None:
        signal = EngineGoneSignal()
        engine = SGLangEngine(
            handle,
            transport,
            model=model,
            sequence_tokens=100,
            version=VERSION,
            connect=lambda url: SGLangClient(url, retry_delays_s=(0.0,)),
            on_engine_lost=signal.cancel_task,
        )
        with signal.raising_engine_failure():
            await Generator("generator-0", bus, engine, "head/arbiter", INCARNATION, engine_gone=signal).run()

    server, hub = FakeServer(act), Hub()
    async with server.serving() as url:
        handle, transport = FakeServerHandle(url), FakeTransport(failure)
        scene = Scene(hub, handle, transport, server)
        generating = asyncio.create_task(generate(hub.join("generator-0", 100), handle, transport))
        await scene.arbiter.receive()  # the first message is EngineJoined
        await scenario(scene)
        with pytest.raises(EngineFailure) as raised:
            await generating
        assert handle.closed
        return str(raised.value), scene.rollout.waiting


async def test_a_dead_server_ends_the_generator_without_failed_turns(model: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.ask(1)
        await scene.ask(2)
        await scene.server.generation_received.wait()
        scene.handle.death.set_result("it lost its process sglang::scheduler")

    cause, num_messages = await run_until_lost(model, streaming(asyncio.Event()), scenario)
    assert cause == "the server ended: it lost its process sglang::scheduler"
    assert num_messages == 0


async def test_an_idle_generator_ends_with_its_server(model: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.handle.death.set_result("out of memory")

    assert await run_until_lost(model, streaming(), scenario) == ("the server ended: out of memory", 0)


async def test_a_connection_broken_by_the_servers_death_does_not_fail_its_turn(model: Path) -> None:
    """The kernel reports a dead server to the reader of its sockets before the watcher notices."""

    async def scenario(scene: Scene) -> None:
        probed = asyncio.Event()

        async def fail_probe(client: SGLangClient) -> bool:
            probed.set()
            return False

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SGLangClient, "is_responsive", fail_probe)
            await scene.ask(1)
            await probed.wait()
            await asyncio.sleep(0)
            scene.handle.death.set_result("killed")
            await asyncio.sleep(0)

    begun = streaming(lambda body: make_response(body, [4]), then="broken")
    assert await run_until_lost(model, begun, scenario) == ("the server ended: killed", 0)


async def test_partially_loaded_weights_end_the_generator(model: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.ask(1)
        await scene.server.generation_received.wait()
        await scene.rollout.send("generator-0", WeightsPublished(VERSION + 1, "/nowhere", 0, "", INCARNATION))

    failure = EngineFailure("some are loaded")
    cause, num_messages = await run_until_lost(model, streaming(asyncio.Event()), scenario, failure)
    assert cause == "the server's weights are incomplete: some are loaded"
    assert num_messages == 0


async def test_a_turn_that_fails_because_its_engine_is_lost_is_not_reported() -> None:
    async def generate(bus: Bus) -> None:
        signal = EngineGoneSignal()

        class LostEngine(ScriptedEngine):
            async def generate(self, request: GenerationRequest) -> Generation:
                signal.cancel_task("the server ended")
                raise EngineFailure("the server ended")

        generator = Generator("generator-0", bus, LostEngine(), "head/arbiter", INCARNATION, engine_gone=signal)
        with signal.raising_engine_failure():
            await generator.run()

    hub = Hub()
    rollout, arbiter = hub.join("rollout-0", 100), hub.join("head", 100)
    generating = asyncio.create_task(generate(hub.join("generator-0", 100)))
    await arbiter.receive()  # the first message is EngineJoined
    await rollout.send("generator-0", turn(1))
    with pytest.raises(EngineFailure, match="the server ended"):
        await generating
    assert rollout.waiting == 0


async def test_a_cancellation_is_not_an_engine_loss() -> None:
    async def serve() -> None:
        with EngineGoneSignal().raising_engine_failure():
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


async def test_grouped_engine_failures_become_one_and_other_errors_stay_unchanged() -> None:
    async def play(error: ExceptionGroup) -> None:
        with EngineGoneSignal().raising_engine_failure():
            raise error

    inner = ExceptionGroup("tasks", [EngineFailure("it broke"), EngineFailure("it broke")])
    with pytest.raises(EngineFailure, match=r"^it broke; out of memory$"):
        await play(ExceptionGroup("tasks", [inner, EngineFailure("out of memory")]))
    with pytest.raises(ExceptionGroup):
        await play(ExceptionGroup("tasks", [EngineFailure("it broke"), KeyError("a bug")]))
