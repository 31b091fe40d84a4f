"""An engine wrapper for benchmarks: methods without an override call the wrapped engine."""

from __future__ import annotations

from bus.messages import WeightsPublished
from engine.contract import Capacity, Engine, EngineLoad, Generation, GenerationRequest


class WrappedEngine:
    """Implements engine.contract.Engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def start(self) -> Capacity:
        return await self._engine.start()

    async def generate(self, request: GenerationRequest) -> Generation:
        return await self._engine.generate(request)

    def abort(self, sequence_id: int) -> None:
        self._engine.abort(sequence_id)

    def release_cache(self, sequence_id: int) -> None:
        self._engine.release_cache(sequence_id)

    async def load_weights(self, weights: WeightsPublished) -> None:
        await self._engine.load_weights(weights)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def sleep(self) -> None:
        await self._engine.sleep()

    @property
    def version(self) -> int:
        return self._engine.version

    def get_load(self) -> EngineLoad:
        return self._engine.get_load()

    async def close(self) -> None:
        await self._engine.close()
