"""The plans of learner.memory.offload equal figures computed by hand: Qwen3 with a colocated server on H200 GPUs of 141 GB."""

import pytest
from msgspec.structs import replace

from asterism.analysis.planning.memory_plan import plan_host
from asterism.analysis.planning.plan_inputs import GIB, PlanInputs
from asterism.analysis.planning.run_plan import build_plan
from asterism.configs.load import load_run
from benchmarks.support.qwen3_models import read_qwen3
from tests.analysis.planning.shipped_plans import ROOT, find, get_bytes, make_machines

PARAMETERS = {"1.7B": 1_720_574_976, "4B": 4_022_468_096, "8B": 8_190_735_360}
TOKEN_BYTES = {"1.7B": 2 * 28 * 8 * 128 * 2, "4B": 2 * 36 * 8 * 128 * 2}
GPU_BYTES, RESERVE = 141e9, 2 * GIB
# With these settings, the peak of a step is at the last layer, with its recomputed activations.
RECOMPUTED = ("learner.memory.activation_checkpointing=full", "learner.memory.micro_batch_tokens=65536")


def make_colocated(model: str, offload: str, *overrides: str, gpus: int = 1) -> PlanInputs:
    sizes = (f"learner.ranks={gpus}", f"engine.num_engines={gpus}", f"learner.memory.offload={offload}")
    run = load_run(ROOT / "configs/qwen3_4b_8gpu.toml", (*sizes, *overrides))
    return PlanInputs(run, read_qwen3(model), make_machines("h200", gpus=gpus))


def count_free_cache_tokens(model: str, held: float) -> int:
    """Count the KV tokens that fit beside the engine's bfloat16 weights and `held` bytes of the learner."""
    return int((GPU_BYTES - RESERVE - 2 * PARAMETERS[model] - held) / TOKEN_BYTES[model])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "with_state", "without"), [("1.7B", 1_000_666, 1_180_693), ("4B", 559_746, 887_095)])
@pytest.mark.parametrize("offload", ["between_steps", "optimizer"])
def test_the_cache_can_use_the_memory_of_an_offloaded_state(
    model: str, with_state: int, without: int, offload: str
) -> None:
    """The numbers of tokens are those of docs/learner.md. One more token does not fit."""
    assert count_free_cache_tokens(model, 12 * PARAMETERS[model]) == with_state
    assert count_free_cache_tokens(model, 0) == without
    for value, tokens in (("none", with_state), (offload, without)):
        for more in (0, 1):
            plan = build_plan(make_colocated(model, value, f"engine.kv_tokens={tokens + more}"))
            assert find(plan, "GPU memory").fits == (more == 0)


def test_the_state_is_in_main_memory_while_engines_generate() -> None:
    """Each of 8 GPUs has an eighth of the state."""
    kept, moved = (build_plan(make_colocated("4B", offload, gpus=8)) for offload in ("none", "between_steps"))
    state = 12 * PARAMETERS["4B"]  # master weights and two moments
    gpus = [get_bytes(find(plan, "GPU memory")) for plan in (kept, moved)]
    hosts = [get_bytes(find(plan, "host memory")) for plan in (kept, moved)]
    assert gpus[0]["learner between steps"] == state / 8
    assert "learner between steps" not in hosts[0]
    assert "learner between steps" not in gpus[1]
    assert hosts[1]["learner between steps"] == state


def test_with_an_update_in_main_memory_the_gpu_keeps_activations_and_gathered_units() -> None:
    kept, offloaded = (
        build_plan(make_colocated("4B", value, "sglang.memory_share=0.1", *RECOMPUTED))
        for value in ("none", "optimizer")
    )
    before, after = (get_bytes(find(plan, "GPU memory")) for plan in (kept, offloaded))
    host = get_bytes(find(offloaded, "host memory"))
    assert before.keys() - after.keys() == {"parameters", "gradients", "optimizer"}
    assert after["activations"] == before["activations"]
    embedding = 151_936 * 2560
    layer = (PARAMETERS["4B"] - embedding - 2560) / 36
    assert before["gathered units"] == pytest.approx(2 * layer)  # a single rank converts only the layers in use
    # Four layers in bfloat16, a float32 shard, gradients in reduction, and the embedding with its gradient.
    assert after["gathered units"] == pytest.approx((4 * 2 + 4 + 4) * layer + 2 * 2 * embedding)
    assert [host[name] / PARAMETERS["4B"] for name in ("parameters", "gradients", "optimizer")] == [4, 4, 8]


def test_a_reference_model_moves_to_main_memory_too() -> None:
    host = get_bytes(plan_host(make_colocated("1.7B", "optimizer", "learner.loss.kl_coef=0.1")))
    assert host["reference model"] == 4 * PARAMETERS["1.7B"]
    host = get_bytes(plan_host(make_colocated("1.7B", "between_steps", "learner.loss.kl_coef=0.1")))
    assert host["learner between steps"] == 16 * PARAMETERS["1.7B"]


@pytest.mark.parametrize(
    ("model", "overrides", "expected"),
    [("4B", ("sglang.memory_share=0.8",), "between_steps"), ("8B", ("sglang.memory_share=0.6",), "optimizer")],
)
def test_the_plan_proposes_the_offload_that_makes_a_configuration_fit(
    model: str, overrides: tuple[str, ...], expected: str
) -> None:
    """4B: a cache of 0.8 * 141 GB leaves no room for a state of 48 GB. 8B: 16 bytes per parameter are 131 GB."""
    inputs = make_colocated(model, "none", *overrides)
    plan = build_plan(inputs)
    assert [each.name for each in plan.shortfalls] == ["GPU memory"]
    assert {"learner.memory.offload": expected} in [change.changes for change in plan.changes]
    assert build_plan(inputs.change({"learner.memory.offload": expected})).shortfalls == []


def test_the_plan_proposes_a_smaller_offload_if_main_memory_does_not_suffice() -> None:
    inputs = make_colocated("4B", "between_steps", "sglang.memory_share=0.6")
    machines = replace(inputs.machines, host_memory_bytes=plan_host(inputs).needed_bytes - 1)
    plan = build_plan(PlanInputs(inputs.run, inputs.config, machines))
    assert [each.name for each in plan.shortfalls] == ["host memory"]
    assert {"learner.memory.offload": "none"} in [change.changes for change in plan.changes]
