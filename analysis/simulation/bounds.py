"""Computes lower bounds of a step's makespan on a cluster: the total work, and the longest chain."""

import msgspec

from asterism.analysis.simulation.cluster_model import SimulatedCluster, StepCostModel
from asterism.analysis.simulation.workload import TrajectoryPlan, Workload


class MakespanBounds(msgspec.Struct, frozen=True):
    """Bounds in seconds."""

    work_s: float
    chain_s: float

    @property
    def lower_s(self) -> float:
        return max(self.work_s, self.chain_s)


def compute_bounds(workload: Workload, cluster: SimulatedCluster) -> MakespanBounds:
    chain_s = max(_compute_alone_s(plan, cluster.cost) for plan in workload.plans)
    return MakespanBounds(_compute_work_s(workload, cluster), chain_s)


def _compute_work_s(workload: Workload, cluster: SimulatedCluster) -> float:
    """Compute the time of the fewest steps that slots and memory allow, on equally loaded engines; prefill is free.

    Each generated token reads all tokens before it. The running sequences' tokens beyond their shared
    prompts fit into the cache, so the reads of such tokens, divided by the capacity, are a lower bound
    of the number of steps. Each step reads the weights.
    """
    cost, tokens = cluster.cost, workload.generated_tokens
    read = sum(_count_read_tokens(plan, plan.prompt_tokens) for plan in workload.plans)
    shared = sum(plan.generated_tokens * plan.prompt_tokens for plan in workload.plans)
    steps = max(tokens / cluster.max_running, read / cluster.kv_tokens)
    products_s = max(steps * cost.weights_s, tokens * cost.token_s)
    once_s = steps * cost.fixed_s + products_s + tokens * cost.sequence_s
    return (once_s + cost.kv_token_s * (read + shared)) / cluster.engines


def _count_read_tokens(plan: TrajectoryPlan, skipped_tokens: int = 0) -> float:
    """Sum, over the generated tokens, the number of earlier tokens without the first `skipped_tokens`."""
    read, begin = 0.0, plan.prompt_tokens
    for turn, end in zip(plan.turns, plan.ends, strict=True):
        last = min(end, plan.final_tokens)
        read += (last - begin) * ((begin + last - 1) / 2 - skipped_tokens)
        begin = last + turn.result_tokens
    return read


def _compute_alone_s(plan: TrajectoryPlan, cost: StepCostModel) -> float:
    """Compute the seconds of a trajectory that runs alone on an engine; prefill is free."""
    steps_s = plan.generated_tokens * cost.compute_constant_s(1) + cost.kv_token_s * _count_read_tokens(plan)
    return steps_s + sum(turn.tool_s for turn in plan.turns)
