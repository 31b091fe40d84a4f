"""A generator runs with a scripted engine, an arbiter and a rollout."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from msgspec.structs import replace

from asterism.actors.engines.weight_loading import WeightLoader
from asterism.actors.generator import Generator
from asterism.bus import messages as msg
from asterism.bus.addresses import RECORDER
from asterism.bus.transport.in_process import Hub
from asterism.configs.schema.algorithm import Sampling
from asterism.engine.contract import Capacity, EngineFailure, EngineLoad, Generation, GenerationRequest, WeightsRefused
from tests.simulation.engines import FakeEngine

STEP_S = 0.1
FETCH_S = 3.0


class ScriptedEngine(FakeEngine):
    """An engine that takes STEP_S per token; sequences that begin with 666 fail, and those with 999 stall."""

    def __init__(self, version: int = 4) -> None:
        self.version = version
        self.steps = 0
        self.running = 0
        self.requests: list[GenerationRequest] = []
        self.released_caches: list[int] = []
        self.aborted: list[int] = []
        self.loaded_versions: list[int] = []
        self.loaded_paths: list[str] = []
        self.refused: list[int] = []
        self.sleeps: list[int] = []  # number of decode steps at each sleep

    @property
    def generated(self) -> list[int]:
        return [each.sequence_id for each in self.requests]

    async def start(self) -> Capacity:
        return Capacity(1024, 16, 512)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate tokens. The logprob of each token is -1 divided by the length of the prompt."""
        self.requests.append(request)
        if request.token_ids[0] == 666:
            raise EngineFailure("out of memory")
        if request.token_ids[0] == 999:
            await asyncio.Event().wait()
        self.running += 1
        for _ in range(request.max_new_tokens):
            await asyncio.sleep(STEP_S)
            self.steps += 1
        self.running -= 1
        count, logprob = request.max_new_tokens, -1.0 / len(request.token_ids)
        columns = (
            np.full(count, 7, np.int32),
            np.full(count, logprob, np.float32),
            np.full(count, self.version, np.int32),
        )
        return Generation(*columns, "length")

    def get_load(self) -> EngineLoad:
        return self.build_load(
            running=self.running, used_tokens=16 * self.running, decode_steps=self.steps, busy_s=self.steps * STEP_S
        )

    def abort(self, sequence_id: int) -> None:
        self.aborted.append(sequence_id)

    def release_cache(self, sequence_id: int) -> None:
        self.released_caches.append(sequence_id)

    async def load_weights(self, weights: msg.WeightsPublished) -> None:
        await asyncio.sleep(STEP_S)
        if weights.version in self.refused:
            raise WeightsRefused("half of the weights are missing")
        self.loaded_versions.append(weights.version)
        self.loaded_paths.append(weights.path)
        self.version = weights.version

    async def sleep(self) -> None:
        assert not self.running
        self.sleeps.append(self.steps)


INCARNATION = 3


def turn(
    tid: int, new_tokens: int = 10, *, lease: int = 1, first: int = 1, incarnation: int = INCARNATION
) -> msg.TurnRequested:
    return msg.TurnRequested(tid, 2, lease, msg.ids_to_bytes([first, 2]), new_tokens, Sampling(), (), 5, incarnation)


class Scene:
    def __init__(self, hub: Hub, engine: ScriptedEngine) -> None:
        self.engine, self.version = engine, engine.version
        self.arbiter, self.rollout = hub.join("head", 100), hub.join("rollout-0", 100)
        self.recorded: list[msg.EngineLoadReported] = []  # load reports to the recorder
        self.reports: list[tuple[float, msg.EngineLoadReported]] = []  # load reports, each with its time in s
        self.fetched: list[int] = []  # versions of fetched weights

    async def send(self, *messages: msg.AnyMessage) -> None:
        for message in messages:
            await self.rollout.send("generator-0", message)

    async def receive(self, count: int) -> list[msg.AnyMessage]:
        return [(await self.rollout.receive()).message for _ in range(count)]

    async def receive_turn(self) -> msg.TurnGenerated:
        """Return the next message to the rollout, which must be a turn."""
        (answer,) = await self.receive(1)
        assert isinstance(answer, msg.TurnGenerated)
        return answer

    async def receive_loaded(self, count: int) -> list[int]:
        """Return the versions of the loaded weights among the next `count` messages to the rollout."""
        return [answer.version for answer in await self.receive(count) if isinstance(answer, msg.WeightsLoaded)]

    async def fetch(self, published: msg.WeightsPublished) -> msg.WeightsPublished:
        """Fetch weights in FETCH_S; version 6 is missing."""
        self.fetched.append(published.version)
        await asyncio.sleep(FETCH_S)
        if published.version == 6:
            raise WeightsRefused("missing")
        return replace(published, path=f"here/{published.version}")

    async def listen(self) -> None:
        joined = (await self.arbiter.receive()).message
        assert joined == msg.EngineJoined("generator-0", 1024, 16, self.version, INCARNATION)
        while True:
            envelope = await self.arbiter.receive()
            message = envelope.message
            assert isinstance(message, msg.EngineLoadReported)
            if envelope.to == RECORDER:
                self.recorded.append(message)
                continue
            self.reports.append((round(asyncio.get_running_loop().time(), 3), message))


@asynccontextmanager
async def open_scene(version: int = 4, *, is_remote: bool = False) -> AsyncIterator[Scene]:
    """Open a scene. With `is_remote`, the learner runs on another machine."""
    hub, engine = Hub(), ScriptedEngine(version)
    scene = Scene(hub, engine)
    clock, fetch = asyncio.get_running_loop().time, scene.fetch if is_remote else None
    bus = hub.join("generator-0", 100)
    actor = Generator(
        "generator-0",
        bus,
        engine,
        "head/arbiter",
        INCARNATION,
        clock,
        recorder=RECORDER,
        loader=WeightLoader(engine, fetch, clock=clock),
    )
    running = asyncio.create_task(actor.run())
    listening = asyncio.create_task(scene.listen())
    yield scene
    await scene.send(msg.Shutdown())
    await running
    listening.cancel()
