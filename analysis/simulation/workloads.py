"""The workloads that have a name, each with its cluster.

    report      the report's step (arXiv 2508.20722): 512 prompts x 32 rollouts on 64 MI300X, at most 8,192 response tokens,
                about 2.7 calls of 0.3 s a trajectory (the report: some 45,000 a step)
    one_node    the release's single node: 128 x 32 on 8 H200, lengths as in the report. The caches are set to hold a third of
                what all trajectories together come to: 0.88 of an H200's memory instead of 0.8
    heavy_tail  128 x 32 on 8 H100; a wide lognormal of which 2% reach the limit
    tool_bound  128 x 32 on 8 H100; shorter turns and more calls, of which 10% take all of the 4 s that a call may

Engines get 0.8 of a GPU's memory, which the release's configuration gives them, with TP 1 as in the report's scheduler.
"""

from __future__ import annotations

from msgspec.structs import replace

from analysis.simulation.model import H100, H200, MI300X, QWEN3_14B, Cluster, cluster_of
from analysis.simulation.workload import Shape, Workload, draw, median_at_limit
from configs.errors import UnusableInput

_LIMIT = 8192
_TAIL_SIGMA = 1.0  # of it a third is the group's

SHAPES = {
    "report": Shape(
        "report", prompts=512, siblings=32, median_tokens=2900, group_sigma=0.45, own_sigma=0.4, mean_calls=2.7
    ),
    "one_node": Shape(
        "one_node", prompts=128, siblings=32, median_tokens=2900, group_sigma=0.45, own_sigma=0.4, mean_calls=2.7
    ),
    "heavy_tail": Shape(
        "heavy_tail",
        prompts=128,
        siblings=32,
        median_tokens=median_at_limit(0.02, _LIMIT, _TAIL_SIGMA),
        group_sigma=_TAIL_SIGMA * (1 / 3) ** 0.5,
        own_sigma=_TAIL_SIGMA * (2 / 3) ** 0.5,
        mean_calls=1.5,
    ),
    "tool_bound": Shape(
        "tool_bound",
        prompts=128,
        siblings=32,
        median_tokens=1000,
        group_sigma=0.45,
        own_sigma=0.4,
        mean_calls=3.0,
        time_out_share=0.1,
    ),
}
_MEMORY_SHARE = 0.8
CLUSTERS_OF = {
    "report": cluster_of(QWEN3_14B, MI300X, 64, memory_share=_MEMORY_SHARE),
    "one_node": cluster_of(QWEN3_14B, H200, 8, memory_share=_MEMORY_SHARE),
    "heavy_tail": cluster_of(QWEN3_14B, H100, 8, memory_share=_MEMORY_SHARE),
    "tool_bound": cluster_of(QWEN3_14B, H100, 8, memory_share=_MEMORY_SHARE),
}
_THIRD = {"one_node"}  # of the demand is what the caches hold


def named(name: str, seed: int, scale: float = 1.0) -> tuple[Workload, Cluster]:
    """`scale`: of prompts and engines alike, for a quick look. Raises UnusableInput."""
    if name not in SHAPES:
        raise UnusableInput(f"no workload {name!r}; there are {', '.join(SHAPES)}")
    shape, cluster = SHAPES[name], CLUSTERS_OF[name]
    engines = max(1, round(cluster.engines * scale))
    prompts = max(1, round(shape.prompts * engines / cluster.engines))
    workload = draw(replace(shape, prompts=prompts), seed)
    cluster = replace(cluster, engines=engines)
    if name in _THIRD:
        cluster = replace(cluster, kv_tokens=workload.demand_tokens // (3 * engines))
    return workload, cluster
