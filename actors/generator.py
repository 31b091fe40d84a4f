"""The generator connects an engine to the bus.

Consumes turns, weights and releases; produces generated turns, and load reports while the engine's load changes. It
waits only for the engine; the arbiter's leases bound the turns in flight.

Duplicate and stale messages are logged and ignored: a turn under an old lease or after its trajectory's end, an abort or
a cache release under an earlier lease, older weights. A turn with a lease of another incarnation of the engine fails
immediately. Weights sent to another incarnation are ignored: the run may already use newer ones.

An engine that shares GPUs with the learner receives sleep requests: it finishes its turns and releases its memory. Turns
that arrive while it sleeps wait for the weights that wake it.

After each load of weights the engine computes the weights' probe, which the recorder compares with the learner's
(policies/health/weight_probes.py).
"""

import asyncio
import time
from collections.abc import Callable

import msgspec
import structlog

from asterism.actors.engines.engine_gone import EngineGoneSignal
from asterism.actors.engines.weight_loading import WeightLoader
from asterism.actors.engines.weight_probing import EngineProber
from asterism.actors.runtime.worker_loop import Work, serve
from asterism.bus.bus import Bus
from asterism.bus.messages import (
    CacheReleased,
    EngineAsleep,
    EngineJoined,
    EngineLoadReported,
    EngineSleepRequested,
    Envelope,
    LeaseReleased,
    TurnAborted,
    TurnFailed,
    TurnGenerated,
    TurnRequested,
    WeightsLoaded,
    WeightsPublished,
)
from asterism.engine.contract import Engine, EngineFailure, EngineLoad, Generation, GenerationRequest, WeightsRefused
from asterism.engine.prefix_tracker import RecentDict

REPORT_INTERVAL_S = 0.25
_LOAD_FIELDS = EngineLoad.__struct_fields__
_ENDED_LEASE = 2**63 - 1  # recorded as the last lease of a trajectory that has ended


class Generator:
    def __init__(
        self,
        name: str,
        bus: Bus,
        engine: Engine,
        arbiter: str,
        incarnation: int = 1,
        clock: Callable[[], float] = time.monotonic,
        recipe: str = "",
        recorder: str = "",
        loader: WeightLoader | None = None,
        engine_gone: EngineGoneSignal | None = None,
    ) -> None:
        """`incarnation` counts the starts of this engine. EngineJoined goes to `recipe`, and to `arbiter` when the engine
        has loaded the weights that `recipe` sends; without `recipe`, to `arbiter` at once. After each load of weights,
        a report goes to `recorder`. `loader` None: the learner is on this machine; no timeout. `engine_gone` cancels
        the task that runs this generator.
        """
        self._name, self._incarnation, self._clock = name, incarnation, clock
        self._bus, self._arbiter, self._recipe, self._recorder = bus, arbiter, recipe, recorder
        self._engine, self._engine_gone = engine, engine_gone
        self._loader = loader or WeightLoader(engine)
        self._latest_leases: RecentDict[int, int] = RecentDict()  # lease of the latest turn, by trajectory
        self._in_flight: dict[int, int] = {}  # lease of the turn in the engine, by trajectory
        self._aborted: set[int] = set()  # trajectories with a turn in flight that was aborted
        self._weights_lock = asyncio.Lock()  # held while weights are loaded
        self._announced_version = 0  # newest published version
        self._joined_arbiter = asyncio.Event()
        self._weights_ready = asyncio.Event()  # set while the engine has the announced version
        self._num_generating = 0  # number of turns and prompts of probes in the engine
        self._prober = EngineProber(self._generate_tokens, engine.release_cache)
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._sleep_request: EngineSleepRequested | None = None  # latest request to sleep
        self._is_asleep = False
        self._last_load_report: EngineLoadReported | None = None
        self._load_may_have_changed = asyncio.Event()
        self._logger = structlog.get_logger()

    async def run(self) -> None:
        """Run until Shutdown, which abandons the turns in flight."""
        capacity = await self._engine.start()
        self._update_weights_ready()
        self._logger.info("engine.started", kv_tokens=capacity.kv_tokens, page_tokens=capacity.page_tokens)
        self._capacity = capacity
        try:
            if self._recipe:
                await self._bus.send(self._recipe, self._build_joined())
            else:
                await self._join_arbiter()
            async with asyncio.TaskGroup() as group:
                reporting = group.create_task(self._report_load())
                await serve(self._bus, self._dispatch)
                reporting.cancel()
            self._log_load()  # logs the work since the last report
        finally:
            await self._engine.close()

    async def _report_load(self) -> None:
        """Report until cancelled: every REPORT_INTERVAL_S while the load changes, and once when it has settled."""
        await self._joined_arbiter.wait()
        while True:
            await self._load_may_have_changed.wait()
            await asyncio.sleep(REPORT_INTERVAL_S)
            if report := self._log_load():
                await self._bus.send(self._arbiter, report)
            elif not self._in_flight:
                self._load_may_have_changed.clear()

    async def _join_arbiter(self) -> None:
        if not self._joined_arbiter.is_set():
            await self._bus.send(self._arbiter, self._build_joined())
            self._joined_arbiter.set()

    def _build_joined(self) -> EngineJoined:
        capacity, version = self._capacity, self._engine.version
        return EngineJoined(self._name, capacity.kv_tokens, capacity.page_tokens, version, self._incarnation)

    def _log_load(self) -> EngineLoadReported | None:
        """Log the load. Return None if it has not changed since the last report."""
        report = self._build_load_report()
        if report == self._last_load_report:
            return None
        self._last_load_report = report
        self._logger.info("engine.load", **{name: getattr(report, name) for name in ("version", *_LOAD_FIELDS)})
        return report

    def _build_load_report(self) -> EngineLoadReported:
        load = msgspec.structs.asdict(self._engine.get_load())
        return EngineLoadReported(
            engine=self._name, version=self._engine.version, incarnation=self._incarnation, **load
        )

    def _dispatch(self, envelope: Envelope) -> Work | None:
        self._load_may_have_changed.set()
        match envelope.message:
            case TurnRequested() as request:
                return self._accept_turn(envelope.sender, request)
            case TurnAborted(trajectory_id=trajectory_id, lease=lease):
                self._abort_turn(trajectory_id, lease)
            case LeaseReleased(trajectory_id=trajectory_id):
                self._latest_leases[trajectory_id] = _ENDED_LEASE
                self._engine.release_cache(trajectory_id)
            case CacheReleased(trajectory_id=trajectory_id, lease=lease):
                if self._latest_leases.get(trajectory_id, lease) <= lease:
                    self._engine.release_cache(trajectory_id)
            case WeightsPublished() as weights:
                if weights.incarnation != self._incarnation:
                    self._logger.warning(
                        "weights.other_incarnation_ignored", version=weights.version, incarnation=weights.incarnation
                    )
                    return None
                self._announced_version = max(self._announced_version, weights.version)
                return self._load_weights(envelope.sender, weights)
            case EngineSleepRequested() as request:
                return self._begin_sleep(envelope.sender, request)
            case other:
                self._logger.error("message.misdirected", kind=type(other).__name__)
        return None

    # ---------------------------------------------------------------- turns

    def _accept_turn(self, sender: str, turn: TurnRequested) -> Work | None:
        if turn.incarnation != self._incarnation:
            cause = (
                f"engine left: the lease is of incarnation {turn.incarnation}, this is incarnation {self._incarnation}"
            )
            return self._bus.send(sender, TurnFailed(turn.trajectory_id, turn.turn, turn.lease, cause))
        if turn.lease <= self._latest_leases.get(turn.trajectory_id, 0):
            self._logger.warning(
                "turn.duplicate_ignored", trajectory_id=turn.trajectory_id, turn=turn.turn, lease=turn.lease
            )
            return None
        self._latest_leases[turn.trajectory_id] = turn.lease
        self._in_flight[turn.trajectory_id] = turn.lease
        return self._serve_turn(sender, turn)

    def _abort_turn(self, trajectory_id: int, lease: int) -> None:
        """Abort the turn, also if its task has not reached the engine yet."""
        if self._in_flight.get(trajectory_id) == lease:
            self._aborted.add(trajectory_id)
            self._engine.abort(trajectory_id)

    async def _serve_turn(self, sender: str, turn: TurnRequested) -> None:
        try:
            answer = await self._generate_turn(turn)
        finally:
            del self._in_flight[turn.trajectory_id]
            self._aborted.discard(turn.trajectory_id)
        await self._bus.send(sender, answer)

    async def _generate_turn(self, turn: TurnRequested) -> TurnGenerated | TurnFailed:
        while not self._weights_ready.is_set():
            await self._weights_ready.wait()
        if turn.trajectory_id in self._aborted:
            return TurnGenerated(turn.trajectory_id, turn.turn, turn.lease, b"", b"", b"", "abort")
        try:
            generation = await self._generate_tokens(GenerationRequest.from_turn(turn))
        except EngineFailure as error:
            if self._engine_gone is not None and self._engine_gone.is_set:
                await asyncio.Event().wait()  # waits until the end of the generator cancels this turn
            self._logger.error("turn.failed", trajectory_id=turn.trajectory_id, turn=turn.turn, cause=str(error))
            return TurnFailed(turn.trajectory_id, turn.turn, turn.lease, f"engine: {error}")
        return generation.build_answer(turn)

    async def _generate_tokens(self, request: GenerationRequest) -> Generation:
        self._num_generating += 1
        self._is_idle.clear()
        try:
            return await self._engine.generate(request)
        finally:
            self._num_generating -= 1
            if not self._num_generating:
                self._is_idle.set()

    # ---------------------------------------------------------------- sleep

    async def _begin_sleep(self, sender: str, request: EngineSleepRequested) -> None:
        """Sleep when idle. Duplicate requests are ignored: only the first is answered. A failure ends the generator."""
        async with self._weights_lock:
            if self._sleep_request is not None and (request.learner_incarnation, request.version) <= (
                self._sleep_request.learner_incarnation,
                self._sleep_request.version,
            ):
                self._logger.warning("sleep.duplicate_ignored", version=request.version)
                return
            self._sleep_request, self._is_asleep = request, True
            self._weights_ready.clear()
            await self._is_idle.wait()
            await self._engine.sleep()
        await self._bus.send(sender, EngineAsleep(self._name, self._incarnation, request))

    # ---------------------------------------------------------------- weights

    def _update_weights_ready(self) -> None:
        """Wait for the newest announced weights: a head that recovered from its log may first publish older ones."""
        if self._engine.version >= self._announced_version and not self._is_asleep:
            self._weights_ready.set()

    async def _load_weights(self, sender: str, weights: WeightsPublished) -> None:
        """Load newer weights. Weights that the engine holds, and older ones, are only acknowledged again.

        Weights that cannot be loaded are not acknowledged: a restarted learner is writing them, and announces them again.
        """
        began, load_s, probed = self._clock(), 0.0, ()
        async with self._weights_lock:
            if self._is_asleep and self._sleep_request is not None and weights.version < self._sleep_request.version:
                return  # this version is older than the sleep; only newer versions end the sleep
            if self._is_asleep or self._loader.is_newer(weights):
                try:
                    await self._loader.load(weights)
                except WeightsRefused as refusal:
                    self._logger.error("weights.refused", version=weights.version, cause=str(refusal))
                    return
                self._is_asleep = False
                load_s = self._clock() - began
                probed = await self._prober.score(weights)
        self._update_weights_ready()
        await self._join_arbiter()
        load = self._engine.get_load()
        fields = {"version": weights.version, "load_s": load_s, "probe_tokens": len(probed)}
        self._logger.info("weights.loaded", **fields, busy_s=load.busy_s, decode_steps=load.decode_steps)
        if self._recorder:  # the recorder needs the report before the step ends
            await self._bus.send(self._recorder, self._build_load_report())
        await self._bus.send(sender, WeightsLoaded(self._name, weights.version, load_s, self._incarnation, probed))
