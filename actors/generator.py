"""The generator: an engine behind the bus.

Consumes turns, weights and releases; produces generated turns. It waits for the engine alone; the arbiter's leases
bound what is in flight.
"""

from __future__ import annotations

import time

import numpy as np
import structlog

from actors.service import Work, serve
from bus.messages import (
    AnyMessage,
    CacheReleased,
    EngineJoined,
    Envelope,
    GenerationContinued,
    GenerationPaused,
    LeaseReleased,
    TurnAborted,
    TurnFailed,
    TurnGenerated,
    TurnRequested,
    WeightsLoaded,
    WeightsPublished,
)
from bus.transport import Bus
from engine.contract import Engine, EngineFailure, GenerationRequest


class Generator:
    def __init__(self, name: str, bus: Bus, engine: Engine, arbiter: str) -> None:
        self._name = name
        self._bus = bus
        self._engine = engine
        self._arbiter = arbiter
        self._leases: dict[int, int] = {}  # the latest under which a trajectory that has a cache here came
        self._logger = structlog.get_logger()

    async def run(self) -> None:
        """Until Shutdown; turns that are under way then are abandoned."""
        capacity = await self._engine.start()
        self._logger.info("engine.started", kv_tokens=capacity.kv_tokens, page_tokens=capacity.page_tokens)
        joined = EngineJoined(self._name, capacity.kv_tokens, capacity.page_tokens, self._engine.version)
        try:
            await self._bus.send(self._arbiter, joined)
            await serve(self._bus, self._take)
        finally:
            await self._engine.close()

    def _take(self, envelope: Envelope) -> Work | None:
        match envelope.message:
            case TurnRequested() as request:
                self._leases[request.trajectory_id] = request.lease
                return self._generate(envelope.sender, request)
            case TurnAborted(trajectory_id=trajectory_id):
                self._engine.abort(trajectory_id)
            case LeaseReleased(trajectory_id=trajectory_id):
                self._forget(trajectory_id)
            case CacheReleased(trajectory_id=trajectory_id, lease=lease):
                if self._leases.get(trajectory_id, lease) <= lease:
                    self._forget(trajectory_id)
            case WeightsPublished() as weights:
                return self._load_weights(envelope.sender, weights)
            case GenerationPaused():
                return self._engine.pause()
            case GenerationContinued():
                return self._engine.resume()
            case other:
                self._logger.error("message.misdirected", kind=type(other).__name__)
        return None

    def _forget(self, trajectory_id: int) -> None:
        self._leases.pop(trajectory_id, None)
        self._engine.forget(trajectory_id)

    async def _generate(self, sender: str, turn: TurnRequested) -> None:
        request = GenerationRequest(
            sequence_id=turn.trajectory_id,
            token_ids=np.frombuffer(turn.token_ids, dtype=np.int32),
            max_new_tokens=turn.max_new_tokens,
            temperature=turn.temperature,
            top_p=turn.top_p,
            top_k=turn.top_k,
            stop_token_ids=turn.stop_token_ids,
            seed=turn.seed,
        )
        answer: AnyMessage
        try:
            generation = await self._engine.generate(request)
        except EngineFailure as error:
            self._logger.error("turn.failed", trajectory_id=turn.trajectory_id, turn=turn.turn, cause=str(error))
            answer = TurnFailed(turn.trajectory_id, turn.turn, turn.lease, f"engine: {error}")
        else:
            answer = TurnGenerated(
                trajectory_id=turn.trajectory_id,
                turn=turn.turn,
                lease=turn.lease,
                token_ids=generation.token_ids.tobytes(),
                logprobs=generation.logprobs.tobytes(),
                versions=generation.versions.tobytes(),
                finish=generation.finish,
            )
        await self._bus.send(sender, answer)

    async def _load_weights(self, sender: str, weights: WeightsPublished) -> None:
        began = time.monotonic()
        await self._engine.load_weights(weights)
        load_s = time.monotonic() - began
        load = self._engine.load()
        self._logger.info(
            "weights.loaded", version=weights.version, load_s=load_s, busy_s=load.busy_s, decode_steps=load.decode_steps
        )
        await self._bus.send(sender, WeightsLoaded(self._name, weights.version, load_s))
