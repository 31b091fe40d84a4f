"""The workload of a simulated step: the planned turns of each trajectory, unknown to the deciders.

A workload is drawn by a seed or loaded from a recorded run (asterism.analysis.simulation.recorded_workload). In a
drawn one, a trajectory's response length is lognormal, with an effect of its group (a hard problem is
long for all siblings) and an effect of its own; the number of calls is geometric; the results of calls and the
split of tokens over turns are random too.
"""

from collections.abc import Sequence
from math import log
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np

_MIN_TURN_TOKENS = 16
_RESULT_SIGMA = 0.6
_MIN_RESULT_TOKENS, _MAX_RESULT_TOKENS = 8, 1024  # tokens of a result with the turn's header


class PlannedTurn(NamedTuple):
    """A planned turn. `result_tokens` is 0 if the turn calls no tool: the last turn of the trajectory."""

    tokens: int  # generated tokens, with the stop token
    tool_s: float = 0.0  # seconds from the request to the result
    result_tokens: int = 0  # tokens appended after the turn


class TrajectoryPlan(NamedTuple):
    """One trajectory. A turn that ends beyond the response limit reaches no stop token."""

    trajectory_id: int
    group_id: int
    prompt_tokens: int
    turns: tuple[PlannedTurn, ...]
    ends: tuple[int, ...]  # position after each turn's last token
    final_tokens: int  # tokens at the end, with the prompt
    generated_tokens: int


class Workload(msgspec.Struct, frozen=True):
    """The groups of a step. Trajectories are numbered from 0, group by group."""

    name: str
    plans: tuple[TrajectoryPlan, ...]
    response_tokens: int
    max_turns: int
    grading_s: float = 0.01
    started_after: dict[int, int] = {}  # replacement group -> the group that it follows

    @property
    def generated_tokens(self) -> int:
        return sum(plan.generated_tokens for plan in self.plans)

    @property
    def demand_tokens(self) -> int:
        """KV tokens of all trajectories at their final lengths, with each group's prompt counted once."""
        own = sum(plan.final_tokens - plan.prompt_tokens for plan in self.plans)
        return own + sum({plan.group_id: plan.prompt_tokens for plan in self.plans}.values())


class WorkloadShape(msgspec.Struct, frozen=True):
    """Distributions of a workload. Sigmas are of the logarithm; shares are in [0, 1]."""

    name: str
    prompts: int
    siblings: int
    median_tokens: float  # median of unlimited responses
    group_sigma: float
    own_sigma: float
    mean_calls: float
    tool_s: float = 0.3  # median of a call's latency
    tool_sigma: float = 0.25
    time_out_share: float = 0.01  # share of calls that take `time_limit_s`
    time_limit_s: float = 4.0
    result_tokens: float = 120.0  # median of results
    prompt_tokens: float = 350.0  # median of prompts
    response_tokens: int = 8192
    max_turns: int = 10


def build_plan(
    trajectory_id: int, group_id: int, prompt_tokens: int, turns: Sequence[PlannedTurn], limit: int
) -> TrajectoryPlan:
    """Build a plan that ends with the first turn that exhausts `limit`, the response tokens."""
    end = prompt_tokens + limit
    position, generated = prompt_tokens, 0
    reached_turns: list[PlannedTurn] = []
    ends: list[int] = []
    for turn in turns:
        reached_turns.append(turn)
        ends.append(position + turn.tokens)
        turn_end = min(ends[-1], end)
        generated += turn_end - position
        position = turn_end
        if ends[-1] > end or position + turn.result_tokens >= end:
            break
        position += turn.result_tokens
    return TrajectoryPlan(
        trajectory_id, group_id, prompt_tokens, tuple(reached_turns), tuple(ends), position, generated
    )


def draw_workload(shape: WorkloadShape, seed: int) -> Workload:
    random = np.random.default_rng([seed, 4])
    count = shape.prompts * shape.siblings
    groups = np.repeat(np.arange(shape.prompts), shape.siblings)
    group_effects = random.normal(0.0, shape.group_sigma, shape.prompts)[groups]
    effects = group_effects + random.normal(0.0, shape.own_sigma, count)
    lengths = np.minimum(shape.median_tokens * np.exp(effects), 4.0 * shape.response_tokens)
    prompts = np.maximum(64, shape.prompt_tokens * np.exp(random.normal(0.0, 0.4, shape.prompts))).astype(int)
    calls = np.minimum(random.geometric(1 / (1 + shape.mean_calls), count) - 1, shape.max_turns - 1)
    plans = tuple(
        build_plan(
            number,
            int(groups[number]),
            int(prompts[groups[number]]),
            _draw_turns(shape, random, float(lengths[number]), int(calls[number])),
            shape.response_tokens,
        )
        for number in range(count)
    )
    return Workload(shape.name, plans, shape.response_tokens, shape.max_turns)


def _draw_turns(shape: WorkloadShape, random: np.random.Generator, length: float, calls: int) -> list[PlannedTurn]:
    """Draw turns and results of about `length` tokens in total."""
    results = np.clip(
        shape.result_tokens * np.exp(random.normal(0.0, _RESULT_SIGMA, calls)), _MIN_RESULT_TOKENS, _MAX_RESULT_TOKENS
    ).astype(int)
    latencies = shape.tool_s * np.exp(random.normal(0.0, shape.tool_sigma, calls))
    latencies = np.where(random.random(calls) < shape.time_out_share, shape.time_limit_s, latencies)
    latencies = np.minimum(latencies, shape.time_limit_s)
    shares = random.exponential(1.0, calls + 1) + 0.3
    generated = max(length - float(results.sum()), _MIN_TURN_TOKENS * (calls + 1.0))
    tokens = np.maximum(_MIN_TURN_TOKENS, shares / shares.sum() * generated).astype(int)
    called = [PlannedTurn(int(tokens[turn]), float(latencies[turn]), int(results[turn])) for turn in range(calls)]
    return [*called, PlannedTurn(int(tokens[calls]))]


def compute_median_for_limit(share: float, limit: int, sigma: float) -> float:
    """Return the median of the lognormal with this share beyond the limit."""
    return float(np.exp(log(limit) - sigma * NormalDist().inv_cdf(1 - share)))
