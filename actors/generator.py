"""The generator: an engine behind the bus.

Consumes turns, weights and releases; produces generated turns, and while the engine's load changes, reports of it. It
waits for the engine alone; the arbiter's leases bound what is in flight.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
import numpy as np
import structlog

from actors.service import Work, serve
from bus.messages import (
    AnyMessage,
    CacheReleased,
    EngineJoined,
    EngineLoadReported,
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
from engine.contract import Engine, EngineFailure, EngineLoad, GenerationRequest

REPORT_EVERY_S = 0.25
_MEASURED = EngineLoad.__struct_fields__


class Generator:
    def __init__(self, name: str, bus: Bus, engine: Engine, arbiter: str) -> None:
        self._name = name
        self._bus = bus
        self._engine = engine
        self._arbiter = arbiter
        self._leases: dict[int, int] = {}  # the latest under which a trajectory that has a cache here came
        self._under_way = 0  # turns
        self._asked = asyncio.Event()  # something has come that may have changed the load
        self._logger = structlog.get_logger()

    async def run(self) -> None:
        """Until Shutdown; turns that are under way then are abandoned."""
        capacity = await self._engine.start()
        self._logger.info("engine.started", kv_tokens=capacity.kv_tokens, page_tokens=capacity.page_tokens)
        joined = EngineJoined(self._name, capacity.kv_tokens, capacity.page_tokens, self._engine.version)
        try:
            await self._bus.send(self._arbiter, joined)
            async with asyncio.TaskGroup() as group:
                reporting = group.create_task(self._report_load())
                await serve(self._bus, self._take)
                reporting.cancel()
        finally:
            await self._engine.close()

    async def _report_load(self) -> None:
        """Until it is cancelled: every REPORT_EVERY_S while the load changes, and a last time when it has come to rest."""
        last: EngineLoadReported | None = None
        while True:
            await self._asked.wait()
            await asyncio.sleep(REPORT_EVERY_S)
            load = msgspec.structs.asdict(self._engine.load())
            report = EngineLoadReported(engine=self._name, version=self._engine.version, **load)
            if report != last:
                last = report
                self._logger.info("engine.load", **{name: getattr(report, name) for name in ("version", *_MEASURED)})
                await self._bus.send(self._arbiter, report)
            elif not self._under_way:
                self._asked.clear()

    def _take(self, envelope: Envelope) -> Work | None:
        self._asked.set()
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
        self._under_way += 1
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
        finally:
            self._under_way -= 1
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
