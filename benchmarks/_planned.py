"""A step's rollouts whose lengths are known beforehand, and an engine that keeps to them.

All lengths are an eighth of what they stand for (arXiv 2508.20722); each prompt has 16 siblings.

    agent      the report's third stage: up to 15 turns and 12,288 tokens beyond the prompt, 7,500 in the mean. Of them half
               are what tools said: six calls in the mean, whose results have 512 tokens in the median (2,048 characters)
    reasoning  its first stage: up to 10 turns and 8,192 tokens, 3,200 in the mean; three and a half calls, of whose results
               a sixth of the tokens are

The model's weights are random, so its stop tokens would say nothing. Each request's limit is set to where the plan ends the
turn, and the turn's last token is replaced by one that says "call" or "answer". The engine has not taken that token in, as
is so with a real stop token; all else is the engine's own: sampling by seed and position, leases that end within a turn,
parked and shared prefixes, eviction, preemption.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec
import numpy as np
from msgspec.structs import replace

from analysis.simulation.tokens import ANSWERS, CALLS
from analysis.simulation.workload import Plan, Shape, Workload
from benchmarks._wrapped_engine import WrappedEngine
from bus.messages import StartGroup
from engine.contract import Capacity, EngineLoad, Generation, GenerationRequest
from engine.embedded import EmbeddedEngine

VOCABULARY = 450
AGENT = Shape(
    "agent",
    prompts=32,
    siblings=16,
    median_tokens=640,
    group_sigma=0.45,
    own_sigma=0.4,
    mean_calls=8.0,
    tool_s=0.1,
    time_limit_s=1.0,
    result_tokens=64,
    prompt_tokens=128,
    response_tokens=1536,
    max_turns=15,
)
REASONING = Shape(
    "reasoning",
    prompts=64,
    siblings=16,
    median_tokens=320,
    group_sigma=0.45,
    own_sigma=0.4,
    mean_calls=4.0,
    tool_s=0.1,
    time_limit_s=1.0,
    result_tokens=16,
    prompt_tokens=96,
    response_tokens=1024,
)
SHAPES = {shape.name: shape for shape in (AGENT, REASONING)}


def groups(work: Workload, seed: int, vocabulary: int = VOCABULARY) -> list[StartGroup]:
    """Prompts are random, one for each group."""
    by_group: dict[int, list[Plan]] = {}
    for plan in work.plans:
        by_group.setdefault(plan.group_id, []).append(plan)
    draws = np.random.default_rng([seed, 5])
    return [
        StartGroup(
            group_id=group_id,
            purpose="train",
            problem="",
            ground_truth="",
            prompt_ids=draws.integers(0, vocabulary, plans[0].prompt_tokens, dtype=np.int32).tobytes(),
            size=len(plans),
            first_trajectory_id=plans[0].trajectory_id,
            temperature=1.0,
            seed=seed + group_id,
        )
        for group_id, plans in by_group.items()
    ]


class Counts(msgspec.Struct, frozen=True):
    """What one engine did. Tokens."""

    load: EngineLoad
    first_prefills: int  # of what was prefilled, tokens that no engine had had of their trajectory
    cpu_s: float  # of the engine's process since it offered its cache


class PlannedEngine(WrappedEngine):
    def __init__(self, engine: EmbeddedEngine, plans: Mapping[int, Plan]) -> None:
        super().__init__(engine)
        self._plans = plans
        self._first_prefills = 0
        self._began_s = 0.0
        self.counts: Counts | None = None  # at the end

    async def generate(self, request: GenerationRequest) -> Generation:
        """The turn's tokens up to its end by the plan, or to the request's limit."""
        plan, tokens = self._plans[request.sequence_id], len(request.token_ids)
        turn = next(number for number, end in enumerate(plan.ends) if end > tokens)
        allowed = min(request.max_new_tokens, plan.ends[turn] - tokens)
        found = await super().generate(replace(request, max_new_tokens=allowed, stop_token_ids=()))
        had = max(_had(plan, turn, tokens), found.cached_tokens)
        self._first_prefills += max(0, tokens - had)
        if found.finish != "length" or tokens + allowed < plan.ends[turn]:
            return found
        found.token_ids[-1] = ANSWERS if turn + 1 == len(plan.turns) else CALLS
        return replace(found, finish="stop")

    async def start(self) -> Capacity:
        capacity = await super().start()
        self._began_s = time.process_time()
        return capacity

    async def close(self) -> None:
        self.counts = Counts(self.load(), self._first_prefills, time.process_time() - self._began_s)
        await super().close()


def _had(plan: Plan, turn: int, tokens: int) -> int:
    """How many of its first tokens had keys and values on some engine before this request of so many tokens."""
    begins = plan.ends[turn - 1] + plan.turns[turn - 1].result_tokens if turn else plan.prompt_tokens
    if tokens > begins:
        return tokens - 1  # within the turn; the last token was not taken in
    return plan.ends[turn - 1] - 1 if turn else 0
