"""Sends many concurrent requests through the adapter, and checks that each answer fits its prompt.

Answers are random, so no exact comparison is possible. Each answer has the logprobs of its tokens,
and the server can compute the logprobs of the same tokens after any prompt. After the answer's own
prompt, the mean difference per token is a rounding error; after another prompt, it is larger. The check
scores every answer after its own prompt, and some after a neighbour's. The limit is a quarter of
the median neighbour difference: an answer counts as mixed up if its own difference is above the
limit. The share of detected mix-ups is the share of neighbour differences above the limit.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median

from asterism.engine.contract import EngineFailure, Generation, GenerationRequest
from asterism.engine.sglang.sglang_engine import SGLangEngine
from benchmarks.support.sglang.bare_client import BareClient

_POLL_S = 0.05
_SCORED_AT_ONCE = 4
_TRIED_EVERY = 4  # one of this many answers is scored after a neighbour's prompt


async def measure_crowd(
    engine: SGLangEngine, bare: BareClient, requests: Sequence[GenerationRequest]
) -> dict[str, float]:
    """Measure requests in flight, and the lost and mixed-up answers. Other keys:
    in_flight                concurrent requests of this process
    in_flight_at_server      maximum of running and queued requests in the server's snapshots
    tokens_per_s_1000        received tokens
    told_apart               share of the mix-ups that the check detects
    own_difference           maximum of an answer's difference after its own prompt
    neighbours_difference    minimum of an answer's difference after a neighbour's prompt
    """
    looking = asyncio.create_task(_watch_max_in_flight(engine, done := asyncio.Event()))
    began = time.perf_counter()
    outcomes = await asyncio.gather(*(engine.generate(request) for request in requests), return_exceptions=True)
    took_s = time.perf_counter() - began
    done.set()
    answered = _collect_answers(requests, outcomes)
    own, neighbours = await _measure_differences(bare, requests, answered)
    limit = median(neighbours or [0.0]) / 4
    tokens = sum(len(generation.token_ids) for generation in answered.values())
    return {
        "in_flight": len(requests),
        "in_flight_at_server": await looking,
        "tokens_per_s_1000": tokens / took_s,
        "lost": len(requests) - len(answered),
        "mixed_up": sum(difference > limit for difference in own),
        "told_apart": sum(difference > limit for difference in neighbours) / max(1, len(neighbours)),
        "own_difference": max(own, default=0.0),
        "neighbours_difference": min(neighbours, default=0.0),
    }


async def _watch_max_in_flight(engine: SGLangEngine, done: asyncio.Event) -> int:
    most = 0
    while not done.is_set():
        load = engine.get_load()
        most = max(most, load.running + load.waiting)
        await asyncio.sleep(_POLL_S)
    return most


def _collect_answers(
    requests: Sequence[GenerationRequest], outcomes: Sequence[Generation | BaseException]
) -> dict[int, Generation]:
    """Return the answers by request index. Report and omit failed and short answers."""
    answered: dict[int, Generation] = {}
    causes: Counter[str] = Counter()
    for place, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
        match outcome:
            case Generation() if len(outcome.token_ids) == request.max_new_tokens:
                answered[place] = outcome
            case Generation():
                causes[f"ended by {outcome.finish} before its length"] += 1
            case EngineFailure():
                causes[str(outcome)] += 1
            case BaseException():
                raise outcome
    for cause, times in causes.items():
        print(f"lost {times} times: {cause}", flush=True)
    return answered


async def _measure_differences(
    bare: BareClient, requests: Sequence[GenerationRequest], answered: dict[int, Generation]
) -> tuple[list[float], list[float]]:
    """Return the differences after each answer's own prompt and after its neighbour's."""
    at_once = asyncio.Semaphore(_SCORED_AT_ONCE)

    async def difference(place: int, to: int) -> float:
        generation = answered[place]
        prompt = requests[(place + to) % len(requests)].token_ids
        async with at_once:
            logprobs = await bare.compute_logprobs(prompt.tolist(), generation.token_ids.tolist())
        return float(abs(logprobs - generation.logprobs).mean())

    own = await asyncio.gather(*(difference(place, 0) for place in answered))
    some = list(answered)[::_TRIED_EVERY]
    return own, await asyncio.gather(*(difference(place, 1) for place in some))
