"""Rollouts of planned lengths for one step, and an engine that enforces the plan.

All lengths are an eighth of the lengths in arXiv 2508.20722; each prompt has 16 siblings.

    agent      the paper's third stage: up to 15 turns and 12,288 tokens after the prompt, mean 7,500.
               Half are tool results: mean six calls, median 512 tokens (2,048 characters) per result
    reasoning  the paper's first stage: up to 10 turns and 8,192 tokens, mean 3,200.
               A sixth are tool results: mean three and a half calls

The model has random weights, so its stop tokens carry no information. The engine sets each
request's limit to the planned end of the turn and replaces the turn's last token with "call" or
"answer". The engine has not prefilled that token, as with a real stop token. All other behaviour is
the engine's own: sampling by seed and position, leases that end within a turn, parked and shared
prefixes, eviction, preemption.
"""

import time
from collections.abc import Mapping

import msgspec
import numpy as np
from msgspec.structs import replace

from asterism.analysis.simulation.synthetic_tokens import ANSWER_TOKEN, CALL_TOKEN
from asterism.analysis.simulation.workload import TrajectoryPlan, Workload, WorkloadShape
from asterism.bus.messages import StartGroup
from asterism.configs.schema.algorithm import Sampling
from asterism.engine.contract import Capacity, EngineLoad, Generation, GenerationRequest, TokenListener
from asterism.engine.inference.embedded import EmbeddedEngine

VOCABULARY = 450
AGENT = WorkloadShape(
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
REASONING = WorkloadShape(
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


def build_groups(work: Workload, seed: int, vocabulary: int = VOCABULARY) -> list[StartGroup]:
    """Build the groups, each with a random prompt."""
    by_group: dict[int, list[TrajectoryPlan]] = {}
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
            sampling=Sampling(),
            seed=seed + group_id,
        )
        for group_id, plans in by_group.items()
    ]


class EngineCounts(msgspec.Struct, frozen=True):
    """Counts of one engine, in tokens."""

    load: EngineLoad
    first_prefills: int  # prefilled tokens that no engine had computed before
    cpu_s: float  # CPU seconds of the engine's process after its start


class PlannedEngine(EmbeddedEngine):
    def __init__(
        self, checkpoint: str, capacity: Capacity, *, threads: int, plans: Mapping[int, TrajectoryPlan]
    ) -> None:
        super().__init__(checkpoint, capacity, threads=threads)
        self._plans = plans
        self._first_prefills = 0
        self._began_s = 0.0
        self.counts: EngineCounts | None = None  # set by `close`

    async def generate(self, request: GenerationRequest, on_tokens: TokenListener | None = None) -> Generation:
        """Generate up to the turn's planned end or the request's limit."""
        plan, tokens = self._plans[request.sequence_id], len(request.token_ids)
        turn = next(number for number, end in enumerate(plan.ends) if end > tokens)
        allowed = min(request.max_new_tokens, plan.ends[turn] - tokens)
        found = await super().generate(replace(request, max_new_tokens=allowed, stop_token_ids=()), on_tokens)
        had = max(_count_computed(plan, turn, tokens), found.cached_tokens)
        self._first_prefills += max(0, tokens - had)
        if found.finish != "length" or tokens + allowed < plan.ends[turn]:
            return found
        found.token_ids[-1] = ANSWER_TOKEN if turn + 1 == len(plan.turns) else CALL_TOKEN
        return replace(found, finish="stop")

    async def start(self) -> Capacity:
        capacity = await super().start()
        self._began_s = time.process_time()
        return capacity

    async def close(self) -> None:
        self.counts = EngineCounts(self.get_load(), self._first_prefills, time.process_time() - self._began_s)
        await super().close()


def _count_computed(plan: TrajectoryPlan, turn: int, tokens: int) -> int:
    """Return how many of the request's `tokens` were computed for earlier requests of the trajectory."""
    begins = plan.ends[turn - 1] + plan.turns[turn - 1].result_tokens if turn else plan.prompt_tokens
    if tokens > begins:
        return tokens - 1  # the request continues a turn; the turn's last token has no keys and values yet
    return plan.ends[turn - 1] - 1 if turn else 0
