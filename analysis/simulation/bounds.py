"""Two times that no schedule of a step can beat on a cluster: all work at the best batch, and the longest chain."""

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
    """Every generated token takes its share of a step of the largest batch, and reads all that lies before it.

    A batch is never larger than the slots, and never more trajectories than there are on an engine in the mean; their
    constant costs are the least at the size where a token's share is smallest. Prefill is taken for nothing but its
    arithmetic, once for each group's prompt and each tool's result.
    """
    cost, tokens = cluster.cost, workload.generated_tokens
    share_s = min(cost.constant_s(size) / size for size in range(1, cluster.max_running + 1))
    read_s = cost.kv_token_s * sum(_read_tokens(plan) for plan in workload.plans)
    return (tokens * share_s + read_s) / cluster.engines


def _read_tokens(plan: Plan) -> float:
    """Summed over its generated tokens: what lies before each. The first of a turn comes with the prefill."""
    read, begin = 0.0, plan.prompt_tokens
    for turn, end in zip(plan.turns, plan.ends, strict=True):
        last = min(end, plan.final_tokens)
        read += (last - begin - 1) * (begin + 1 + last - 1) / 2
        begin = last + turn.result_tokens
    return read


def _chain_s(workload: Workload, cluster: Cluster) -> float:
    return max(_alone_s(plan, cluster.cost, workload.grading_s) for plan in workload.plans)


def _alone_s(plan: Plan, cost: Cost, grading_s: float) -> float:
    """The trajectory by itself on an engine, its prefills for nothing."""
    steps_s = plan.generated_tokens * cost.constant_s(1) + cost.kv_token_s * _read_tokens(plan)
    return steps_s + sum(turn.tool_s for turn in plan.turns)
