"""Two times that no schedule of a step can beat on a cluster: all of the work, and the longest chain of it."""

from __future__ import annotations

import msgspec

from analysis.simulation.model import Cluster, Cost
from analysis.simulation.workload import Plan, Workload


class Bounds(msgspec.Struct, frozen=True):
    """Seconds."""

    work_s: float
    chain_s: float

    @property
    def lower_s(self) -> float:
        return max(self.work_s, self.chain_s)


def bounds_of(workload: Workload, cluster: Cluster) -> Bounds:
    return Bounds(work_s=_work_s(workload, cluster), chain_s=_chain_s(workload, cluster))


def _work_s(workload: Workload, cluster: Cluster) -> float:
    """All tokens in as few steps as slots and memory allow, spread evenly over the engines; prefill for nothing.

    Each generated token reads all that lie before it. What the running ones hold beyond their shared prompts fits into
    the cache, so the reads of that kind divided by the capacity are a number of steps that it takes at least, and each
    step reads the weights.
    """
    cost, tokens = cluster.cost, workload.generated_tokens
    read = sum(_read_tokens(plan, plan.prompt_tokens) for plan in workload.plans)
    shared = sum(plan.generated_tokens * plan.prompt_tokens for plan in workload.plans)
    steps = max(tokens / cluster.max_running, read / cluster.kv_tokens)
    products_s = max(steps * cost.weights_s, tokens * cost.token_s)
    once_s = steps * cost.fixed_s + products_s + tokens * cost.sequence_s
    return (once_s + cost.kv_token_s * (read + shared)) / cluster.engines


def _read_tokens(plan: Plan, without: int = 0) -> float:
    """Summed over its generated tokens: how many lie before each, beyond the first `without`."""
    read, begin = 0.0, plan.prompt_tokens
    for turn, end in zip(plan.turns, plan.ends, strict=True):
        last = min(end, plan.final_tokens)
        read += (last - begin) * ((begin + last - 1) / 2 - without)
        begin = last + turn.result_tokens
    return read


def _chain_s(workload: Workload, cluster: Cluster) -> float:
    return max(_alone_s(plan, cluster.cost) for plan in workload.plans)


def _alone_s(plan: Plan, cost: Cost) -> float:
    """The trajectory by itself on an engine, its prefills for nothing."""
    steps_s = plan.generated_tokens * cost.constant_s(1) + cost.kv_token_s * _read_tokens(plan)
    return steps_s + sum(turn.tool_s for turn in plan.turns)
