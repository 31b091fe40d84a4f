"""A generator with a scripted engine, an arbiter and a rollout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np

from actors.generator import FetchToNode, Generator
from bus.messages import (
    AnyMessage,
    EngineJoined,
    EngineLoadReported,
    Shutdown,
    TurnRequested,
    WeightsPublished,
)
from bus.transport.in_process import Hub
from engine.contract import Capacity, EngineFailure, EngineLoad, Generation, GenerationRequest, WeightsRefused
from policies.rollout.token_record import ids_to_bytes
from tests.simulation.clock import run_virtually

STEP_S = 0.1


class ScriptedEngine:
    """Implements engine.contract.Engine: a token takes STEP_S; a sequence that begins with 666 fails."""

    def __init__(self, version: int = 4) -> None:
        self.version = version
        self.steps = 0
        self.running = 0
        self.released_caches: list[int] = []
        self.generated: list[int] = []  # sequences
        self.aborted: list[int] = []
        self.loaded_versions: list[int] = []
        self.loaded_paths: list[str] = []
        self.refused: list[int] = []
        self.sleeps: list[int] = []  # decode steps at each sleep

    async def start(self) -> Capacity:
        return Capacity(1024, 16, 512)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.generated.append(request.sequence_id)
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

    def get_load(self) -> EngineLoad:
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
        self.aborted.append(sequence_id)

    def release_cache(self, sequence_id: int) -> None:
        self.released_caches.append(sequence_id)

    async def load_weights(self, weights: WeightsPublished) -> None:
        await asyncio.sleep(STEP_S)
        if weights.version in self.refused:
            raise WeightsRefused("half of them are missing")
        self.loaded_versions.append(weights.version)
        self.loaded_paths.append(weights.path)
        self.version = weights.version

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        assert not self.running
        self.sleeps.append(self.steps)

    async def close(self) -> None: ...


INCARNATION = 3


def turn(
    tid: int, new_tokens: int = 10, *, lease: int = 1, first: int = 1, incarnation: int = INCARNATION
) -> TurnRequested:
    return TurnRequested(tid, 2, lease, ids_to_bytes([first, 2]), new_tokens, 1.0, 1.0, 0, (), 5, incarnation)


class Scene:
    def __init__(self, hub: Hub, engine: ScriptedEngine) -> None:
        self.engine, self.version = engine, engine.version
        self.arbiter, self.rollout = hub.join("head", 100), hub.join("rollout-0", 100)
        self.reports: list[tuple[float, EngineLoadReported]] = []

    async def send(self, *messages: AnyMessage) -> None:
        for message in messages:
            await self.rollout.send("generator-0", message)

    async def listen(self) -> None:
        assert (await self.arbiter.receive()).message == EngineJoined(
            "generator-0", 1024, 16, self.version, INCARNATION
        )
        while True:
            message = (await self.arbiter.receive()).message
            assert isinstance(message, EngineLoadReported)
            self.reports.append((round(asyncio.get_running_loop().time(), 3), message))


@asynccontextmanager
async def scene(version: int = 4, fetch: FetchToNode | None = None) -> AsyncIterator[Scene]:
    hub, engine = Hub(), ScriptedEngine(version)
    each = Scene(hub, engine)
    clock = asyncio.get_running_loop().time
    actor = Generator(
        "generator-0", hub.join("generator-0", 100), engine, "head/arbiter", INCARNATION, clock, fetch=fetch
    )
    running = asyncio.create_task(actor.run())
    listening = asyncio.create_task(each.listen())
    yield each
    await each.send(Shutdown())
    await running
    listening.cancel()


def play(scenario: Callable[[Scene], Awaitable[None]], version: int = 4, fetch: FetchToNode | None = None) -> None:
    async def whole() -> None:
        async with scene(version, fetch) as each:
            await scenario(each)

    run_virtually(whole())
