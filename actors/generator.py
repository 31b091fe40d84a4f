"""The generator: an engine behind the bus.

Consumes turns, weights and releases; produces generated turns, and while the engine's load changes, reports of it. It
waits for the engine alone; the arbiter's leases bound what is in flight.

What comes twice or late does no harm, and is a line of the log: a turn under a lease that has been, or after its
trajectory's end; a word to stop a turn, or to forget a cache, under an earlier lease; older weights. A turn whose lease
is of another life of this engine fails at once.

Where it shares GPUs with the learner it is asked to rest: the engine ends its turns and gives its memory back, and those
that come then wait for the weights that end the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import structlog

from actors.clock import Clock
from actors.service import Work, serve
from bus.messages import (
    CacheReleased,
    EngineJoined,
    EngineLoadReported,
    EngineRested,
    Envelope,
    LeaseReleased,
    RestRequested,
    TurnAborted,
    TurnFailed,
    TurnGenerated,
    TurnRequested,
    WeightsLoaded,
    WeightsPublished,
)
from bus.transport import Bus
from engine.contract import Engine, EngineFailure, EngineLoad, Generation, GenerationRequest, WeightsRefused

REPORT_EVERY_S = 0.25
_MEASURED = EngineLoad.__struct_fields__
_REMEMBERED = 65_536  # trajectories whose turns have come here
_OVER = 2**63 - 1  # stands for a trajectory's last lease once it has ended

Nearby = Callable[[WeightsPublished], Awaitable[WeightsPublished]]


class Generator:
    def __init__(
        self,
        name: str,
        bus: Bus,
        engine: Engine,
        arbiter: str,
        life: int = 1,
        clock: Clock = time.monotonic,
        recipe: str = "",
        nearby: Nearby | None = None,
    ) -> None:
        """`life` counts the starts of the engine of this name. `arbiter` and `recipe` hear that it joins. `nearby` brings
        weights to where this machine can read them, or raises WeightsRefused; None where the learner runs on it."""
        self._name = name
        self._life = life
        self._clock = clock
        self._bus = bus
        self._engine = engine
        self._arbiter = arbiter
        self._recipe = recipe
        self._nearby = nearby
        self._leases: OrderedDict[int, int] = OrderedDict()  # by trajectory, the latest under which it came
        self._under_way: dict[int, int] = {}  # by trajectory, the lease of the turn that the engine works on
        self._aborted: set[int] = set()  # of these trajectories
        self._loading = asyncio.Lock()  # weights, one version after the other
        self._told = 0  # the newest version that it was told of
        self._has_policy = asyncio.Event()  # before that version it generates nothing
        self._num_generating = 0  # turns that are in the engine
        self._is_idle = asyncio.Event()  # none is
        self._is_idle.set()
        self._rest: RestRequested | None = None  # the last one that was asked for
        self._rests = False
        self._noted: EngineLoadReported | None = None  # the last load
        self._asked = asyncio.Event()  # something has come that may have changed the load
        self._logger = structlog.get_logger()

    async def run(self) -> None:
        """Until Shutdown; turns that are under way then are abandoned."""
        capacity = await self._engine.start()
        self._note_version()
        self._logger.info("engine.started", kv_tokens=capacity.kv_tokens, page_tokens=capacity.page_tokens)
        joined = EngineJoined(self._name, capacity.kv_tokens, capacity.page_tokens, self._engine.version, self._life)
        try:
            for decider in filter(None, (self._recipe, self._arbiter)):
                await self._bus.send(decider, joined)
            async with asyncio.TaskGroup() as group:
                reporting = group.create_task(self._report_load())
                await serve(self._bus, self._take)
                reporting.cancel()
            self._note_load()  # what it did since the last report counts too
        finally:
            await self._engine.close()

    async def _report_load(self) -> None:
        """Until it is cancelled: every REPORT_EVERY_S while the load changes, and a last time when it has come to rest."""
        while True:
            await self._asked.wait()
            await asyncio.sleep(REPORT_EVERY_S)
            if report := self._note_load():
                await self._bus.send(self._arbiter, report)
            elif not self._under_way:
                self._asked.clear()

    def _note_load(self) -> EngineLoadReported | None:
        """In this process's log. None if nothing has changed since the last time."""
        load = msgspec.structs.asdict(self._engine.load())
        report = EngineLoadReported(engine=self._name, version=self._engine.version, life=self._life, **load)
        if report == self._noted:
            return None
        self._noted = report
        self._logger.info("engine.load", **{name: getattr(report, name) for name in ("version", *_MEASURED)})
        return report

    def _take(self, envelope: Envelope) -> Work | None:
        self._asked.set()
        match envelope.message:
            case TurnRequested() as request:
                return self._begin(envelope.sender, request)
            case TurnAborted(trajectory_id=trajectory_id, lease=lease):
                self._abort(trajectory_id, lease)
            case LeaseReleased(trajectory_id=trajectory_id):
                self._note_lease(trajectory_id, _OVER)
                self._engine.forget(trajectory_id)
            case CacheReleased(trajectory_id=trajectory_id, lease=lease):
                if self._leases.get(trajectory_id, lease) <= lease:
                    self._engine.forget(trajectory_id)
            case WeightsPublished() as weights:
                self._told = max(self._told, weights.version)
                return self._load_weights(envelope.sender, weights)
            case RestRequested() as rest:
                return self._begin_rest(envelope.sender, rest)
            case other:
                self._logger.error("message.misdirected", kind=type(other).__name__)
        return None

    # ---------------------------------------------------------------- turns

    def _begin(self, sender: str, turn: TurnRequested) -> Work | None:
        if turn.life != self._life:
            cause = f"engine left: its lease is of life {turn.life}, this is life {self._life}"
            return self._bus.send(sender, TurnFailed(turn.trajectory_id, turn.turn, turn.lease, cause))
        if turn.lease <= self._leases.get(turn.trajectory_id, 0):
            self._logger.warning("turn.repeated", trajectory_id=turn.trajectory_id, turn=turn.turn, lease=turn.lease)
            return None
        self._note_lease(turn.trajectory_id, turn.lease)
        self._under_way[turn.trajectory_id] = turn.lease
        return self._generate(sender, turn)

    def _note_lease(self, trajectory_id: int, lease: int) -> None:
        self._leases[trajectory_id] = lease
        self._leases.move_to_end(trajectory_id)
        if len(self._leases) > _REMEMBERED:
            self._leases.popitem(last=False)

    def _abort(self, trajectory_id: int, lease: int) -> None:
        """Also where the turn's task has not come to the engine yet."""
        if self._under_way.get(trajectory_id) == lease:
            self._aborted.add(trajectory_id)
            self._engine.abort(trajectory_id)

    async def _generate(self, sender: str, turn: TurnRequested) -> None:
        try:
            answer = await self._answer_to(turn)
        finally:
            del self._under_way[turn.trajectory_id]
            self._aborted.discard(turn.trajectory_id)
        await self._bus.send(sender, answer)

    async def _answer_to(self, turn: TurnRequested) -> TurnGenerated | TurnFailed:
        while not self._has_policy.is_set():
            await self._has_policy.wait()
        if turn.trajectory_id in self._aborted:
            return TurnGenerated(turn.trajectory_id, turn.turn, turn.lease, b"", b"", b"", "abort")
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
        try:
            generation = await self._generation(request)
        except EngineFailure as error:
            self._logger.error("turn.failed", trajectory_id=turn.trajectory_id, turn=turn.turn, cause=str(error))
            return TurnFailed(turn.trajectory_id, turn.turn, turn.lease, f"engine: {error}")
        return TurnGenerated(
            trajectory_id=turn.trajectory_id,
            turn=turn.turn,
            lease=turn.lease,
            token_ids=generation.token_ids.tobytes(),
            logprobs=generation.logprobs.tobytes(),
            versions=generation.versions.tobytes(),
            finish=generation.finish,
        )

    async def _generation(self, request: GenerationRequest) -> Generation:
        self._num_generating += 1
        self._is_idle.clear()
        try:
            return await self._engine.generate(request)
        finally:
            self._num_generating -= 1
            if not self._num_generating:
                self._is_idle.set()

    # ---------------------------------------------------------------- rest

    async def _begin_rest(self, sender: str, rest: RestRequested) -> None:
        """One that was asked for before is over, or is said by who was asked first. An engine that cannot rest has to be
        started again."""
        async with self._loading:
            if self._rest is not None and (rest.life, rest.version) <= (self._rest.life, self._rest.version):
                self._logger.warning("rest.repeated", version=rest.version)
                return
            self._rest, self._rests = rest, True
            self._has_policy.clear()
            await self._is_idle.wait()
            await self._engine.release()
        await self._bus.send(sender, EngineRested(self._name, self._life, rest))

    # ---------------------------------------------------------------- weights

    def _note_version(self) -> None:
        """Older weights come first where the head goes on from its log, and cannot know what a former life here was told."""
        if self._engine.version >= self._told and not self._rests:
            self._has_policy.set()

    async def _load_weights(self, sender: str, weights: WeightsPublished) -> None:
        """Where it holds these or newer ones, it says so again and keeps what it has. What cannot be loaded is not
        answered: a learner that has begun again is writing it, and says when it is there."""
        began = self._clock()
        async with self._loading:
            if self._rests and self._rest is not None and weights.version < self._rest.version:
                return  # those of before the rest: others will come, at its end
            if self._rests or weights.version > self._engine.version:
                try:
                    await self._engine.load_weights(await self._fetched(weights))
                except WeightsRefused as refusal:
                    self._logger.error("weights.refused", version=weights.version, cause=str(refusal))
                    return
                self._rests = False
        self._note_version()
        load_s = self._clock() - began
        load = self._engine.load()
        self._logger.info(
            "weights.loaded", version=weights.version, load_s=load_s, busy_s=load.busy_s, decode_steps=load.decode_steps
        )
        await self._bus.send(sender, WeightsLoaded(self._name, weights.version, load_s, self._life))

    async def _fetched(self, weights: WeightsPublished) -> WeightsPublished:
        """While they come, the engine goes on with those that it has."""
        if self._nearby is None:
            return weights
        began = self._clock()
        near = await self._nearby(weights)
        fetch_s = self._clock() - began
        self._logger.info("weights.fetched", version=weights.version, bytes=weights.num_bytes, fetch_s=fetch_s)
        return near
