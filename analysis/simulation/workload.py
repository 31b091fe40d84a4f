"""What a step asks of its engines and tools: for each trajectory its turns, known in advance to the simulation alone.

Drawn by a seed: a trajectory's response length is lognormal, with an effect of its group (a hard problem is long for all)
and one of its own; its calls are geometric; their results and the split of its tokens over turns are drawn too. Or read
from a recorded run: `analysis.simulation.recorded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np

_LEAST_TURN = 16  # tokens
_RESULT_SIGMA = 0.6
_LEAST_RESULT, _MOST_RESULT = 8, 1024  # tokens of a tool's result with the turn's header


class Turn(NamedTuple):
    """`result_tokens` is 0 where the turn calls no tool: the trajectory's last."""

    tokens: int  # that the model generates; the stop token is the last
    tool_s: float = 0.0  # from the request to the result
    result_tokens: int = 0  # that follow


class Plan(NamedTuple):
    """One trajectory. A turn that ends beyond the response limit never stops by itself."""

    trajectory_id: int
    group_id: int
    prompt_tokens: int
    turns: tuple[Turn, ...]
    ends: tuple[int, ...]  # position behind each turn's last token
    final_tokens: int  # at its end, prompt included
    generated_tokens: int


class Workload(msgspec.Struct, frozen=True):
    """A step's groups, all of them started at once but those in `after`. Trajectories are numbered from 0, group by group."""

    name: str
    plans: tuple[Plan, ...]
    response_tokens: int
    max_turns: int
    grading_s: float = 0.01
    after: dict[int, int] = {}  # group: the one whose end starts it, as where it stands in for a rejected one

    @property
    def generated_tokens(self) -> int:
        return sum(plan.generated_tokens for plan in self.plans)

    @property
    def demand_tokens(self) -> int:
        """What all trajectories at their ends would hold at once, each group's prompt counted once."""
        own = sum(plan.final_tokens - plan.prompt_tokens for plan in self.plans)
        return own + sum({plan.group_id: plan.prompt_tokens for plan in self.plans}.values())


class Shape(msgspec.Struct, frozen=True):
    """Distributions. Sigmas are of the logarithm; shares in [0, 1]."""

    name: str
    prompts: int
    siblings: int
    median_tokens: float  # of a response, without the limit
    group_sigma: float
    own_sigma: float
    mean_calls: float
    tool_s: float = 0.3  # median of a call's latency
    tool_sigma: float = 0.25
    time_out_share: float = 0.01  # of the calls that end at the limit
    time_limit_s: float = 4.0
    result_tokens: float = 120.0  # median
    prompt_tokens: float = 350.0  # median
    response_tokens: int = 8192
    max_turns: int = 10


def plan_of(trajectory_id: int, group_id: int, prompt_tokens: int, turns: Sequence[Turn], limit: int) -> Plan:
    """What the trajectory's rules make of these turns: it ends with the first one that leaves no room behind it.

    `limit`: response tokens.
    """
    end = prompt_tokens + limit
    position, generated = prompt_tokens, 0
    kept: list[Turn] = []
    ends: list[int] = []
    for turn in turns:
        kept.append(turn)
        ends.append(position + turn.tokens)
        behind = min(ends[-1], end)
        generated += behind - position
        position = behind
        if ends[-1] > end or position + turn.result_tokens >= end:
            break
        position += turn.result_tokens
    return Plan(trajectory_id, group_id, prompt_tokens, tuple(kept), tuple(ends), position, generated)


def draw(shape: Shape, seed: int) -> Workload:
    random = np.random.default_rng([seed, 4])
    count = shape.prompts * shape.siblings
    groups = np.repeat(np.arange(shape.prompts), shape.siblings)
    group_effects = random.normal(0.0, shape.group_sigma, shape.prompts)[groups]
    effects = group_effects + random.normal(0.0, shape.own_sigma, count)
    lengths = np.minimum(shape.median_tokens * np.exp(effects), 4.0 * shape.response_tokens)
    prompts = np.maximum(64, shape.prompt_tokens * np.exp(random.normal(0.0, 0.4, shape.prompts))).astype(int)
    calls = np.minimum(random.geometric(1 / (1 + shape.mean_calls), count) - 1, shape.max_turns - 1)
    plans = tuple(
        plan_of(
            number,
            int(groups[number]),
            int(prompts[groups[number]]),
            _turns(shape, random, float(lengths[number]), int(calls[number])),
            shape.response_tokens,
        )
        for number in range(count)
    )
    return Workload(shape.name, plans, shape.response_tokens, shape.max_turns)


def _turns(shape: Shape, random: np.random.Generator, length: float, calls: int) -> list[Turn]:
    """Turns and results that add up to about `length` tokens."""
    results = np.clip(
        shape.result_tokens * np.exp(random.normal(0.0, _RESULT_SIGMA, calls)), _LEAST_RESULT, _MOST_RESULT
    ).astype(int)
    latencies = shape.tool_s * np.exp(random.normal(0.0, shape.tool_sigma, calls))
    latencies = np.where(random.random(calls) < shape.time_out_share, shape.time_limit_s, latencies)
    latencies = np.minimum(latencies, shape.time_limit_s)
    shares = random.exponential(1.0, calls + 1) + 0.3
    generated = max(length - float(results.sum()), _LEAST_TURN * (calls + 1.0))
    tokens = np.maximum(_LEAST_TURN, shares / shares.sum() * generated).astype(int)
    called = [Turn(int(tokens[turn]), float(latencies[turn]), int(results[turn])) for turn in range(calls)]
    return [*called, Turn(int(tokens[calls]))]


def median_at_limit(share: float, limit: int, sigma: float) -> float:
    """The median of a lognormal of which such a share lies beyond the limit."""
    return float(np.exp(log(limit) - sigma * NormalDist().inv_cdf(1 - share)))
