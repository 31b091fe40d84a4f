"""Each benchmark runs in its short form and prints its figures as one JSON line."""

import pytest

from tests.benchmarks.programs import run_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WAYS = ("processes", "without_log", "in_process", "in_process_without_log", "single")
BATCHES = (1, 16, 64, 256)
# Least model FLOP/s utilization of a GRPO step, as in docs/gpu.md.
MFU_FLOORS = {"1.7B_8192": 0.42, "1.7B_16384": 0.42, "4B_8192": 0.38, "4B_16384": 0.38}
CORRECTIONS = ("engine", "none", "tis", "icepop", "decoupled")
KEYS: dict[str, tuple[str, ...]] = {
    "weights": (
        *("mib", "copied_bytes_per_s", "fetched_bytes_per_s", "ratio_to_copy", "nodes", "nodes_bytes_per_s"),
        *("nodes_ratio_to_one", "server_cpu_s_per_gb", "node_cpu_s_per_gb", "worst_lag_ms", "server_peak_mib"),
        *(f"{part}_cpu_s_per_gb_{dtype}" for part in ("publish", "load") for dtype in ("float32", "bfloat16")),
        *(
            f"adapters_{part}_{dtype}"
            for part in ("publish_cpu_s", "load_cpu_s_per_gb")
            for dtype in ("float32", "bfloat16")
        ),
        *("model_mb", "adapters_mb"),
    ),
    "bus --peers 50 --events 10000": (
        *("ratio_to_pyzmq_asyncio", "messages_per_s", "round_trip_p50_us", "round_trip_p99_us", "peers"),
        *("log_events_per_s", "story_ms_1m_events", "streamed_messages", "sender_mib", "receiver_mib"),
    ),
    "determinism": tuple(
        f"{kind}_over_fast_{batch}" for kind in ("strict", "tiles_64", "tiles_16", "tiles_4") for batch in BATCHES
    ),
    "experiments.variants overlong": ("experiment", "seeds", "variants"),
    "gpu": (
        *(
            f"step_small_256.{key}"
            for key in ("step_s", "share_of_gemm", "peak_gib", "peak_over_plan", "checkpointing")
        ),
        *("passes_small.passes_s", "head.head_gib", "weights_small.weights_s", "decode_small.share_of_bandwidth"),
        *("demo.cpu_first_reward", "demo.device_first_reward", "demo.device_last_reward", "run_small.train_s"),
    ),
    "gpu.estimate": tuple(
        f"1.7B_8192.{key}" for key in ("step_ms", "mfu", "share_of_gemm", "checkpointing", "kernels", "gib")
    ),
    "learner": (
        *("tokens_per_s", "ratio_padded", "ratio_padded_small", "ratio_sorted", "bf16_ratio_17m", "fill"),
        *("lockstep_loss_4096_rows_64_ranks", "plan_s", "tokens_per_s_eager", "ratio_sorted_eager", "compile_s"),
        "ratio_shared_17m",
    ),
    "mismatch": (
        *(f"cosine.{kind}.{row}" for kind in CORRECTIONS for row in ("small", "some", "far", "many")),
        *(f"norm.{kind}.{row}" for kind in CORRECTIONS for row in ("small", "some", "far", "many")),
        *("seed", *(f"finite.{kind}" for kind in CORRECTIONS)),
        *(f"logits_{kind}_{dtype}_8.0" for kind in ("error", "worst") for dtype in ("bfloat16", "float32")),
        "logits_cost_2048",
    ),
    "generation": (
        *(f"{figure}_{batch}" for figure in ("tokens_per_s", "ratio") for batch in BATCHES),
        *("two_engines", "differing_trajectories_share", "kv_lookahead_over_least_requests"),
    ),
    "sandbox --backend process": ("process",),
    "scheduler --workload report --policies static,kv_lookahead": (
        *("decisions_per_s", "worst_decision_ms", "simulate_report_s", "workloads", "later_step"),
        "times_as_long_as_kv_lookahead",
    ),
    "step": (
        *(f"{part}_s_{way}" for part in ("step", "rollout", "train") for way in WAYS),
        *("ratio", "log_ratio", "log_ratio_in_process", "zeromq_ratio"),
    ),
    "validation": ("share", "demand_tokens", "steps", "policies"),
}


@pytest.mark.parametrize(
    "program", [pytest.param(each, marks=() if each == "weights" else pytest.mark.nightly) for each in KEYS]
)
def test_a_benchmark_prints_its_figures_as_one_json_line(program: str) -> None:
    figures = run_program(f"{program} --quick")
    assert all(figures[key] is not None for key in KEYS[program])


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_estimate_of_each_step_exceeds_its_floor() -> None:
    figures = run_program("gpu.estimate")
    found = {name: figures[f"{name}.mfu"] for name in MFU_FLOORS}
    assert all(found[name] >= floor for name, floor in MFU_FLOORS.items()), found
