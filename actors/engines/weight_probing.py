"""The prober computes an engine's probe of loaded weights, for policies/health/weight_probes.py to compare."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

import numpy as np
import structlog

from asterism.bus.messages import WeightsPublished
from asterism.configs.schema.algorithm import GREEDY
from asterism.engine.contract import EngineFailure, Generation, GenerationRequest

PROBE_TIMEOUT_S = 30.0  # seconds; the run waits for the engine meanwhile


class EngineProber:
    def __init__(
        self,
        generate: Callable[[GenerationRequest], Awaitable[Generation]],
        release_cache: Callable[[int], None],
    ) -> None:
        self._generate, self._release_cache = generate, release_cache
        # Negative ids belong to no trajectory. Each id is used once, so that its tokens do not count as recomputed.
        self._sequence_ids = count(-1, -1)
        self._logger = structlog.get_logger()

    async def score(self, weights: WeightsPublished) -> tuple[float, ...]:
        """Generate one greedy token after each prompt of the weights' probe, as a turn does.

        Return the tokens' log probabilities, or none without a probe, after a failure or after PROBE_TIMEOUT_S.
        """
        if weights.probe is None:
            return ()
        requests = [
            GenerationRequest(next(self._sequence_ids), np.frombuffer(prompt, np.int32), 1, GREEDY)
            for prompt in weights.probe.prompts
        ]
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                results = await asyncio.gather(*map(self._generate, requests))
        except (EngineFailure, TimeoutError) as failure:
            self._log_failure(weights, str(failure) or f"no answer after {PROBE_TIMEOUT_S:g} s")
            return ()
        finally:
            for request in requests:
                self._release_cache(request.sequence_id)
        if any(each.versions.tolist() != [weights.version] for each in results):
            self._log_failure(weights, "the engine generated with another version")
            return ()
        return tuple(float(each.logprobs[0]) for each in results)

    def _log_failure(self, weights: WeightsPublished, cause: str) -> None:
        self._logger.warning("weights.not_probed", version=weights.version, cause=cause)
