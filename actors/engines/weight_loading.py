"""A loader brings published weights into an engine of this machine: transfer from the learner if necessary, timeout,
and comparison by digest."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import Engine, EngineFailure

FetchToNode = Callable[[WeightsPublished], Awaitable[WeightsPublished]]


class WeightLoader:
    def __init__(
        self,
        engine: Engine,
        fetch: FetchToNode | None = None,
        timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fetch` copies weights to this machine or raises WeightsRefused; it is None if the learner runs here.

        `timeout_s` limits the transfer plus the load.
        """
        self._engine, self._fetch, self._timeout_s, self._clock = engine, fetch, timeout_s, clock
        self._loaded_digest = ""
        self._logger = structlog.get_logger()

    def is_newer(self, weights: WeightsPublished) -> bool:
        """Return whether the engine has an older version, or this version with other bits: a restarted learner trains a
        version again."""
        held = self._engine.version
        return weights.version > held or (weights.version == held and weights.digest != self._loaded_digest)

    async def load(self, weights: WeightsPublished) -> None:
        """Transfer and load the weights. Raises WeightsRefused, or EngineFailure after the timeout."""
        stage = "transfer to this machine"
        try:
            async with asyncio.timeout(self._timeout_s):
                fetched = await self._fetch_to_node(weights)
                stage = "load into the engine"
                await self._engine.load_weights(fetched)
        except TimeoutError:
            raise EngineFailure(
                f"the engine has no weights of version {weights.version} ({weights.num_bytes:,} bytes) after "
                f"engine.load_timeout_s = {self._timeout_s:g} s: the {stage} stalls"
            ) from None
        self._loaded_digest = weights.digest

    async def _fetch_to_node(self, weights: WeightsPublished) -> WeightsPublished:
        """Transfer the weights; meanwhile the engine generates with its present ones."""
        if self._fetch is None:
            return weights
        began = self._clock()
        fetched = await self._fetch(weights)
        fetch_s = self._clock() - began
        self._logger.info("weights.fetched", version=weights.version, bytes=weights.num_bytes, fetch_s=fetch_s)
        return fetched
