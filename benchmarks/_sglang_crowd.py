"""Many requests in flight at once through the adapter, and whether each has the answer to its own prompt.

An answer's tokens are drawn, so none is known beforehand. But each comes with the logprob that it had after its prompt, and the
server can be asked what logprobs the same tokens have after any prompt. The difference, in the mean over an answer's
tokens, is rounding after its own prompt; after another one it is what the prompts make of it. So every answer is put to
its own prompt, and some to their neighbours'. A quarter of the latter's median is the limit: an answer that is further from
its own prompt is mixed up. The share that is further from a neighbour's is that of the mix-ups that would be seen.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median

from benchmarks._bare_sglang import BareClient
from engine.contract import EngineFailure, Generation, GenerationRequest
from engine.sglang.engine import SGLangEngine

_LOOK_S = 0.05
_SCORED_AT_ONCE = 4
_TRIED_EVERY = 4  # answer after a neighbour's prompt


async def crowd(engine: SGLangEngine, bare: BareClient, requests: Sequence[GenerationRequest]) -> dict[str, float]:
    """
    in_flight                at once, here
    in_flight_at_server      the most that ran or waited there, in its own snapshots
    tokens_per_s_1000        of what came
    told_apart               share of the mix-ups that would be seen
    own_difference           the largest
    neighbours_difference    the smallest
    """
    looking = asyncio.create_task(_most_at_server(engine, done := asyncio.Event()))
    began = time.perf_counter()
    outcomes = await asyncio.gather(*(engine.generate(request) for request in requests), return_exceptions=True)
    took_s = time.perf_counter() - began
    done.set()
    answered = _answered(requests, outcomes)
    own, neighbours = await _differences(bare, requests, answered)
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


async def _most_at_server(engine: SGLangEngine, done: asyncio.Event) -> int:
    most = 0
    while not done.is_set():
        load = engine.load()
        most = max(most, load.running + load.waiting)
        await asyncio.sleep(_LOOK_S)
    return most


def _answered(
    requests: Sequence[GenerationRequest], outcomes: Sequence[Generation | BaseException]
) -> dict[int, Generation]:
    """By the request's place. What failed, or has not as many tokens as were asked for, is lost, and said."""
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


async def _differences(
    bare: BareClient, requests: Sequence[GenerationRequest], answered: dict[int, Generation]
) -> tuple[list[float], list[float]]:
    """After an answer's own prompt, and after its neighbour's."""
    at_once = asyncio.Semaphore(_SCORED_AT_ONCE)

    async def difference(place: int, to: int) -> float:
        generation = answered[place]
        prompt = requests[(place + to) % len(requests)].token_ids
        async with at_once:
            logprobs = await bare.logprobs_after(prompt.tolist(), generation.token_ids.tolist())
        return float(abs(logprobs - generation.logprobs).mean())

    own = await asyncio.gather(*(difference(place, 0) for place in answered))
    some = list(answered)[::_TRIED_EVERY]
    return own, await asyncio.gather(*(difference(place, 1) for place in some))
