"""Named workloads, each with its cluster.

    report      the step of arXiv 2508.20722: 512 prompts x 32 rollouts on 64 MI300X, at most 8,192
                response tokens, about 2.7 calls of 0.3 s per trajectory (about 45,000 calls per step in the paper)
    one_node    the release's single node: 128 x 32 on 8 H200, lengths as in `report`. Engines get
                0.88 of a GPU's memory; the caches hold a third of the final tokens of all trajectories
    heavy_tail  128 x 32 on 8 H100; a wide lognormal: 2% of the responses reach the limit
    tool_bound  128 x 32 on 8 H100; shorter turns and more calls: 10% of the calls take the time limit of 4 s

Other engines get 0.8 of a GPU's memory, as in the release's configuration, with TP 1 as in the paper's scheduler.
"""

from msgspec.structs import replace

from asterism.analysis.simulation.cluster_model import H100, H200, MI300X, QWEN3_14B, SimulatedCluster, build_cluster
from asterism.analysis.simulation.workload import Workload, WorkloadShape, compute_median_for_limit, draw_workload
from asterism.configs.errors import UnusableInput

_LIMIT = 8192
_TAIL_SIGMA = 1.0  # a third of the variance is between groups

_REPORT = WorkloadShape(
    "report", prompts=512, siblings=32, median_tokens=2900, group_sigma=0.45, own_sigma=0.4, mean_calls=2.7
)
SHAPES = {
    "report": _REPORT,
    "one_node": replace(_REPORT, name="one_node", prompts=128),
    "heavy_tail": WorkloadShape(
        "heavy_tail",
        prompts=128,
        siblings=32,
        median_tokens=compute_median_for_limit(0.02, _LIMIT, _TAIL_SIGMA),
        group_sigma=_TAIL_SIGMA * (1 / 3) ** 0.5,
        own_sigma=_TAIL_SIGMA * (2 / 3) ** 0.5,
        mean_calls=1.5,
    ),
    "tool_bound": WorkloadShape(
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
WORKLOAD_CLUSTERS = {
    "report": build_cluster(QWEN3_14B, MI300X, 64, memory_share=_MEMORY_SHARE),
    "one_node": build_cluster(QWEN3_14B, H200, 8, memory_share=_MEMORY_SHARE),
    "heavy_tail": build_cluster(QWEN3_14B, H100, 8, memory_share=_MEMORY_SHARE),
    "tool_bound": build_cluster(QWEN3_14B, H100, 8, memory_share=_MEMORY_SHARE),
}
_SCARCE_WORKLOADS = {"one_node"}  # the caches hold a third of the demand


def draw_named_workload(name: str, seed: int, scale: float = 1.0) -> tuple[Workload, SimulatedCluster]:
    """Draw a named workload and its cluster. `scale` multiplies prompts and engines. Raises UnusableInput."""
    if name not in SHAPES:
        raise UnusableInput(f"no workload {name!r}; workloads: {', '.join(SHAPES)}")
    shape, cluster = SHAPES[name], WORKLOAD_CLUSTERS[name]
    engines = max(1, round(cluster.engines * scale))
    prompts = max(1, round(shape.prompts * engines / cluster.engines))
    workload = draw_workload(replace(shape, prompts=prompts), seed)
    cluster = replace(cluster, engines=engines)
    if name in _SCARCE_WORKLOADS:
        cluster = replace(cluster, kv_tokens=workload.demand_tokens // (3 * engines))
    return workload, cluster
