"""The generator around an engine that does as it is told, between a decider and a rollout that listen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np

from actors.generator import Generator, Nearby
from bus.in_process import Hub
from bus.messages import (
    AnyMessage,
    EngineJoined,
    EngineLoadReported,
    Shutdown,
    TurnRequested,
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
        self.released: list[int] = []  # steps that it had made then

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

    async def release(self) -> None:
        assert not self.running
        self.released.append(self.steps)

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
