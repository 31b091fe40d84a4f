"""Plans name the resources that do not fit, with values of keys that suffice."""

from operator import attrgetter
from typing import Any

import pytest
from msgspec.structs import replace

from asterism.analysis.planning.memory_plan import WRITE_BYTES, compute_cached_token_bytes, plan_gpu, plan_host
from asterism.analysis.planning.model_size import measure_model
from asterism.analysis.planning.plan_inputs import GIB, GPUS, SEQUENCE_KEYS, PlanInputs, PlannedMachines
from asterism.analysis.planning.plan_table import describe_remedy
from asterism.analysis.planning.run_plan import RunPlan, build_plan
from asterism.analysis.planning.storage_plan import plan_disk, plan_shared_memory
from asterism.configs.load import load_run
from asterism.configs.schema.sglang import SPARE_TOKENS
from asterism.engine.export import hf_export
from asterism.engine.hf.architectures import ARCHITECTURES
from asterism.engine.learner import weight_publisher
from benchmarks.support.qwen3_models import read_qwen3
from tests.analysis.planning.shipped_plans import (
    NODE,
    ROOT,
    STAGES,
    find,
    get_bytes,
    make_1gpu_inputs,
    make_inputs,
    make_machines,
)
from tests.engine.tiny_models import small_architecture

CACHE = "KV tokens of a server"
KEEPS_ALL = "learner.memory.activation_checkpointing=none"


# ---------------------------------------------------------------- the shipped configurations


H200, MI300X = make_machines("h200"), make_machines("mi300x", nodes=8)


@pytest.mark.parametrize(
    ("model", "file", "stages", "machines"),
    [
        ("1.7B", "qwen3_1.7b_1gpu", (), make_machines("h100", gpus=1)),
        ("4B", "qwen3_4b_8gpu", (), make_machines("h100")),
        ("14B", "rstar2_cold_start", (), H200),
        ("14B", "rstar2_release", (), H200),
        *(("14B", "rstar2_14b_8gpu", (stage,), H200) for stage in STAGES),
        *(("14B", "rstar2_14b_64gpu", (stage,), MI300X) for stage in STAGES),
        ("14B", "rstar2_whole_64gpu", (), MI300X),
    ],
)
def test_shipped_configurations_fit_their_machines(
    model: str, file: str, stages: tuple[str, ...], machines: PlannedMachines
) -> None:
    inputs = make_inputs(model, *stages, file=file, machines=machines)
    plan = build_plan(inputs)
    assert plan.shortfalls == []
    assert plan.seconds.step_s is not None
    assert inputs.machines.gpu is not None
    assert find(plan, "GPU memory").needed_bytes > 0.5 * inputs.machines.gpu.memory_bytes


def test_the_plan_names_a_checkpointing_mode_if_14b_does_not_fit_without() -> None:
    plan = build_plan(
        make_inputs("14B", KEEPS_ALL, "stage=12k", file="rstar2_14b_8gpu", machines=make_machines("h200"))
    )
    assert [each.name for each in plan.shortfalls] == ["GPU memory"]
    assert {"learner.memory.activation_checkpointing": "selective"} in [change.changes for change in plan.changes]


def test_gradients_reduced_once_are_unsharded_and_the_plan_proposes_each_micro_batch() -> None:
    machines, settings = make_machines("h100"), ("sglang.memory_share=0.4", "evaluation.response_tokens=0")
    each = make_inputs("14B", *settings, "stage=12k", file="rstar2_14b_8gpu", machines=machines)
    once = each.change({"learner.memory.reduce_gradients": "once"})
    assert build_plan(each).shortfalls == []
    plan = build_plan(once)
    assert get_bytes(find(plan, "GPU memory"))["gradients"] == 4 * 14_768_307_200
    assert {"learner.memory.reduce_gradients": "each_micro_batch"} in [change.changes for change in plan.changes]


# ---------------------------------------------------------------- shortfalls


@pytest.mark.parametrize(
    ("overrides", "machines", "resource", "key", "expected"),
    [
        (
            "learner.memory.micro_batch_tokens=65536",
            {},
            "GPU memory",
            "learner.memory.micro_batch_tokens",
            range(9216, 16_384),
        ),
        ("learner.checkpoints.keep=9", {"disk_bytes": 500 * GIB}, "disk", "learner.checkpoints.keep", [6]),
        ("rl.max_staleness=0", {"nodes": 1, "gpus": 4}, "GPUs of the engines", "engine.num_engines", [4]),
    ],
)
def test_the_plan_names_almost_the_largest_value_that_fits(
    overrides: str, machines: dict[str, Any], resource: str, key: str, expected: range | list[int]
) -> None:
    inputs = make_inputs("4B", overrides, machines=replace(NODE, **machines))
    plan = build_plan(inputs)
    short = next(each for each in plan.shortfalls if each.name == resource)
    (value,) = (change.changes[key] for change in plan.changes if change.changes.keys() == {key})
    assert value in expected
    assert f"{key} = {value}" in describe_remedy(plan, short)
    assert resource not in [each.name for each in build_plan(inputs.change({key: value})).shortfalls]
    before = attrgetter(key)(inputs.run)
    larger = value + max(1, before // 16)
    assert resource in [each.name for each in build_plan(inputs.change({key: larger})).shortfalls]


def test_a_plan_proposes_a_smaller_cache_if_the_cache_does_not_fit() -> None:
    plan = build_plan(make_1gpu_inputs("engine.kv_tokens=262144"))
    (change,) = (each for each in plan.changes if "engine.kv_tokens" in each.changes)
    assert change.changes == {"engine.kv_tokens": 114_688}  # 7/16 of 262144


@pytest.mark.parametrize("overrides", [(), ("stage=12k",)])
def test_a_larger_share_is_proposed_if_no_trajectory_fits_into_the_cache(overrides: tuple[str, ...]) -> None:
    file, machines = "rstar2_14b_8gpu", make_machines("h100")
    inputs = make_inputs("14B", "sglang.memory_share=0.3", *overrides, file=file, machines=machines)
    plan = build_plan(inputs)
    (short,) = plan.shortfalls
    assert (short.name, short.needed) == (CACHE, inputs.run.sequence_tokens + SPARE_TOKENS)
    assert plan.changes[0].changes == {"sglang.memory_share": 0.45}
    assert build_plan(inputs.change(plan.changes[0].changes)).shortfalls == []
    fixed = build_plan(inputs.change({"engine.kv_tokens": 32_768}))
    assert CACHE not in [each.name for each in fixed.counts]


def test_trajectories_longer_than_the_context_of_the_model_do_not_fit() -> None:
    full = "learner.memory.activation_checkpointing=full"
    inputs = make_inputs("4B", "dialogue.response_tokens=60000", full, machines=make_machines("h100"))
    plan = build_plan(inputs)
    (short,) = plan.shortfalls
    assert (short.name, short.needed) == ("tokens of the model's context", inputs.run.sequence_tokens)
    assert describe_remedy(plan, short) == "set dialogue.response_tokens = 37500"
    assert build_plan(inputs.change({"dialogue.response_tokens": 37_500})).shortfalls == []


def test_long_evaluations_need_cache_in_the_engines_but_no_learner_memory() -> None:
    longer = make_inputs("4B", "evaluation.response_tokens=60000", machines=make_machines("h100"))
    inputs = longer.change({"evaluation.response_tokens": 0})
    assert longer.micro_batch_tokens == inputs.micro_batch_tokens
    assert longer.mean_sequence_tokens == inputs.mean_sequence_tokens
    plan = build_plan(longer)
    assert [(each.name, each.keys) for each in plan.shortfalls] == [("tokens of the model's context", SEQUENCE_KEYS)]
    assert describe_remedy(plan, plan.shortfalls[0]) == "set evaluation.response_tokens = 37500"
    assert plan.seconds == build_plan(inputs).seconds


@pytest.mark.slow
def test_proposals_for_gpu_memory_leave_cache_for_a_trajectory() -> None:
    nodes = ("cluster.nodes=2", "cluster.learner_nodes=2", "evaluation.response_tokens=0")
    qwen3_32b = replace(read_qwen3("14B"), num_layers=64, num_heads=64, intermediate_size=25_600)
    inputs = make_inputs("14B", *nodes, file="rstar2_14b_64gpu", machines=make_machines("h100", nodes=2))
    inputs = PlanInputs(inputs.run, qwen3_32b, inputs.machines)
    plan = build_plan(inputs)
    assert {"GPU memory", CACHE} <= {each.name for each in plan.shortfalls}
    (change,) = (each.changes for each in plan.changes if each.resource == "GPU memory")
    assert change == {"sglang.memory_share": 0.85, "learner.memory.offload": "between_steps"}
    assert CACHE not in [each.name for each in build_plan(inputs.change(change)).shortfalls]


@pytest.mark.slow
def test_the_plan_names_two_keys_if_one_does_not_suffice() -> None:
    machines = PlannedMachines(8, GPUS["h100"], 1)
    plan = build_plan(
        make_inputs("8B", KEEPS_ALL, "stage=12k", "sglang.colocate=false", file="rstar2_14b_8gpu", machines=machines)
    )
    assert {len(change.changes) for change in plan.changes if change.resource == "GPU memory"} == {2}


def test_the_plan_proposes_another_machine_if_no_key_removes_the_shortfall() -> None:
    plan = build_plan(make_inputs("4B", machines=PlannedMachines(8, GPUS["h100"], shared_memory_bytes=GIB)))
    (short,) = plan.shortfalls
    assert describe_remedy(plan, short).startswith("enlarge /dev/shm")


def test_a_plan_without_a_machine_has_no_shortfalls() -> None:
    plan = build_plan(make_inputs("14B", machines=PlannedMachines()))
    assert plan.shortfalls == []
    assert plan.seconds.step_s is None
    assert find(plan, "GPU memory").needed_bytes > 100 * GIB


# ---------------------------------------------------------------- parts


def test_the_kv_cache_has_two_values_per_layer_and_head_for_each_token() -> None:
    inputs = make_1gpu_inputs()
    assert compute_cached_token_bytes(inputs) == 2 * 28 * 8 * 128 * 2
    gpu = get_bytes(plan_gpu(inputs))
    assert gpu["KV cache"] == 65_536 * 114_688
    assert gpu["engine weights"] == 2 * (1_720_574_976 + 151_936 * 2048)  # an engine holds the tied embedding twice


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("engine.max_running=64", 64 * 151_936 * (8 + 8) + 256 * 2**20),  # graphs, eager sampling, attention
        ("engine.page_tokens=256", 64 * 151_936 * (8 + 8)),  # with pages of 256 tokens, attention needs no workspace
        ("engine.cuda_graphs=false", 64 * 151_936 * 8 + (1024 + 256) * 2**20),  # copies: at most 1 GiB
        ("evaluation.sampling.top_p=0.9", 64 * 151_936 * (25 + 8) + 256 * 2**20),
        ("engine.max_running=250", 256 * 151_936 * (8 + 8) + 256 * 2**20),  # graphs pad 250 rows to 256
    ],
)
def test_an_embedded_engine_has_buffers_for_sampling_and_attention(override: str, expected: int) -> None:
    inputs = make_1gpu_inputs(override)
    assert get_bytes(plan_gpu(inputs))["engine buffers"] == expected


def test_servers_have_no_engine_buffers() -> None:
    assert "engine buffers" not in get_bytes(plan_gpu(make_inputs("4B")))


def test_tensor_parallelism_divides_the_cache_by_at_most_its_key_heads() -> None:
    one, eight, sixteen = (
        make_inputs("4B", f"sglang.tensor_parallel={size}", "engine.num_engines=1", "engine.kv_tokens=65536")
        for size in (1, 8, 16)
    )
    assert compute_cached_token_bytes(one) == 8 * compute_cached_token_bytes(eight)
    assert compute_cached_token_bytes(sixteen) == compute_cached_token_bytes(eight)


def test_a_checkpoint_has_12_bytes_per_parameter_and_the_exported_model() -> None:
    disk = get_bytes(plan_disk(make_inputs("4B", "learner.checkpoints.keep=4")))
    assert disk["checkpoints"] == (4 + 3) * 12 * 4_022_468_096
    assert disk["exported models"] == (4 + 3) * 2 * 4_022_468_096
    assert disk["batches"] == 10 * 128 * 8 * 4608 * 9  # 10 steps of 128 groups with 8 kept trajectories


def test_a_gpu_plan_counts_the_reference_model_only_with_kl() -> None:
    plain, with_kl = (
        get_bytes(find(build_plan(make_1gpu_inputs(*more)), "GPU memory"))
        for more in ((), ("learner.loss.kl_coef=0.1",))
    )
    assert with_kl["reference model"] == 4 * 1_720_574_976
    assert "reference model" not in plain


def test_a_run_with_adapters_trains_and_saves_only_the_adapters() -> None:
    """Qwen3-1.7B: 28 layers of width 2048, 16 query and 8 key heads of 128, inner size 6144; adapters of rank 16."""
    total, adapters = 1_720_574_976, 28 * 16 * (2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144))
    settings = ("learner.lora.rank=16", "learner.loss.kl_coef=0.1")
    inputs = make_1gpu_inputs(*settings)
    gpu, disk = get_bytes(find(build_plan(inputs), "GPU memory")), get_bytes(plan_disk(inputs))
    kept = inputs.run.learner.checkpoints.keep + 3
    assert gpu["parameters"] == 4 * (total + adapters)
    assert gpu["optimizer"] in {8 * adapters, 12 * adapters}  # bytes with or without a temporary tensor
    assert "reference model" not in gpu
    assert disk["checkpoints"] == kept * 12 * adapters + 4 * total
    cold = make_1gpu_inputs(*settings, "sft.steps=1", "sft.data=sft.jsonl")
    assert get_bytes(find(build_plan(cold), "GPU memory"))["parameters"] == 4 * total
    assert get_bytes(plan_disk(cold))["checkpoints"] == disk["checkpoints"] + 12 * total


@pytest.mark.slow
def test_the_longest_dialogue_of_a_cold_start_has_its_own_micro_batch() -> None:
    def plan_cold_start(*settings: str) -> RunPlan:
        return build_plan(make_1gpu_inputs(*settings, "sft.data=sft.jsonl"))

    disabled, unlimited = (plan_cold_start(f"sft.steps={steps}") for steps in (0, 100))
    assert (disabled.resources, disabled.notes) == (unlimited.resources, ())
    (note,) = unlimited.notes
    assert note.startswith("sft.max_tokens = 0 sets no limit to dialogues of the cold start; assumed: at most 9,216 ")
    limited = plan_cold_start("sft.steps=100", "sft.max_tokens=40001")
    assert limited.notes == ()
    larger = plan_cold_start("sft.steps=100", "learner.memory.micro_batch_tokens=40000")
    assert find(limited, "GPU memory").items == find(larger, "GPU memory").items
    assert [each.name for each in limited.shortfalls] == ["GPU memory"]
    assert "sft.max_tokens" in {key for change in limited.changes for key in change.changes}


def test_published_adapters_need_one_copy_of_the_weights_in_shared_memory() -> None:
    total, adapters = 1_720_574_976, 28 * 16 * (2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144))
    settings = ("learner.lora.rank=16", "engine.kind=embedded", "sglang.colocate=false", "rl.max_staleness=2")
    for publish, expected in (("merged", 3 * 2 * total), ("adapters", 2 * total + 3 * 4 * adapters)):
        inputs = make_1gpu_inputs(*settings, f"learner.lora.publish={publish}")
        (shared,) = plan_shared_memory(inputs).items
        assert shared.bytes == expected
        assert get_bytes(find(build_plan(inputs), "host memory"))["weights in shared memory"] == expected
    assert shared.note == "the base, and 3 versions of adapters in bfloat16"


@pytest.mark.parametrize(
    ("settings", "proposed"),
    [
        (("learner.lora.rank=16", "engine.kind=embedded"), [{"learner.lora.publish": "adapters"}]),
        (("learner.lora.rank=16", "sglang.weights=tensor"), [{"learner.lora.publish": "adapters"}]),
        (("learner.lora.rank=16", "sglang.data_parallel=2"), []),  # servers with data parallelism load no adapters
        (("learner.lora.rank=0", "engine.kind=embedded"), []),
    ],
)
def test_a_plan_proposes_to_publish_adapters_if_shared_memory_is_short(
    settings: tuple[str, ...], proposed: list[dict[str, str]]
) -> None:
    fixed = ("engine.kind=sglang", "sglang.colocate=false", "rl.max_staleness=0", "engine.kv_tokens=65536")
    machines = PlannedMachines(1, GPUS["h100"], 1, 1024 * GIB, 5 * GIB, 4096 * GIB)
    plan = build_plan(make_1gpu_inputs(*fixed, *settings, machines=machines))
    assert [change.changes for change in plan.changes if change.resource == "shared memory"] == proposed


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_architecture_has_a_plan(model_type: str) -> None:
    run = load_run(ROOT / "configs/tiny.toml")
    config = small_architecture(model_type)
    plan = build_plan(PlanInputs(run, config, PlannedMachines(host_memory_bytes=64 * GIB)))
    assert plan.shortfalls == []
    assert plan.parameters == measure_model(config).total


def test_an_exporting_rank_holds_the_largest_tensors() -> None:
    assert WRITE_BYTES == weight_publisher.BUCKET_BYTES == hf_export.BUCKET_BYTES
    host = get_bytes(plan_host(make_inputs("4B", "learner.ranks=2")))
    assert host["weights in writing"] == 4 * (151_936 * 2560 + 2560 * 9728)
    assert "weight buckets" not in host


def test_servers_that_receive_weights_need_two_buckets_each() -> None:
    host = get_bytes(plan_host(make_inputs("4B", "engine.kind=sglang", "sglang.weights=group", "engine.num_engines=3")))
    assert host["weight buckets"] == 3 * 2 * 2 * 151_936 * 2560  # the embedding exceeds sglang.bucket_mib
