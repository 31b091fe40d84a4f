"""Planned memory of weights in transfer to engines: slots, folders for servers, and buckets of a transfer."""

import pytest
from msgspec.structs import replace

from asterism.analysis.planning.memory_plan import plan_gpu, plan_host
from asterism.analysis.planning.plan_inputs import GIB, GPUS, PlanInputs
from asterism.analysis.planning.plan_table import build_plan_tables, describe_remedy
from asterism.analysis.planning.run_plan import build_plan
from asterism.analysis.planning.storage_plan import plan_shared_memory
from asterism.engine.weight_transfer.published_bytes import MAX_FOLDERS, count_slot_bytes
from tests.analysis.planning.shipped_plans import STAGES, find, get_bytes, make_1gpu_inputs, make_inputs, make_machines
from tests.consoles import capture

WHOLE = 2 * 14_768_307_200  # weights of Qwen3-14B in bfloat16
BUCKET = 2 * 151_936 * 5120  # the embedding, which exceeds sglang.bucket_mib


def make_14b(*overrides: str) -> PlanInputs:
    """Build plan inputs with eight servers that share the learner's GPUs."""
    return make_inputs("14B", *overrides, file="rstar2_14b_8gpu", machines=make_machines("h100"))


def list_shared(inputs: PlanInputs) -> dict[str, float]:
    return get_bytes(plan_shared_memory(inputs))


def test_eight_servers_with_folders_need_two_slots_and_two_folders() -> None:
    inputs = make_14b()
    assert inputs.run.engine.num_engines == 8
    assert list_shared(inputs) == {"published weights": 2 * WHOLE, "weights for servers": MAX_FOLDERS * WHOLE}
    one = make_14b("engine.num_engines=1")
    assert list_shared(one) == {"published weights": 2 * WHOLE, "weights for servers": WHOLE}
    assert get_bytes(plan_host(inputs))["weights in shared memory"] == 4 * WHOLE


@pytest.mark.parametrize(("transport", "buckets"), [("tensor", 6), ("group", 2)])
def test_transfers_in_buckets_need_main_memory_and_gpu_memory_but_no_folder(transport: str, buckets: int) -> None:
    inputs = make_14b(f"sglang.weights={transport}")
    assert list_shared(inputs) == {"published weights": 2 * WHOLE}
    assert get_bytes(plan_host(inputs))["weight buckets"] == 8 * buckets * BUCKET
    assert get_bytes(plan_gpu(inputs))["weight bucket"] == BUCKET


def test_ipc_transfers_need_gpu_memory_but_no_main_memory() -> None:
    inputs = make_14b("sglang.weights=ipc")
    assert list_shared(inputs) == {"published weights": 2 * WHOLE}
    assert "weight buckets" not in get_bytes(plan_host(inputs))
    assert get_bytes(plan_gpu(inputs))["weight bucket"] == 2 * BUCKET + GIB / 2
    assert build_plan(inputs).shortfalls == []
    on_cpu = make_14b("sglang.weights=ipc", "engine.device=cpu", "engine.kv_tokens=32768", "sglang.colocate=false")
    assert list_shared(on_cpu) == {"published weights": 2 * WHOLE, "weight buckets": 8 * 2 * BUCKET}
    assert get_bytes(plan_host(on_cpu))["weights in shared memory"] == 2 * WHOLE + 16 * BUCKET


def test_request_bodies_are_counted_for_each_rank_of_a_server() -> None:
    ranks = ("sglang.tensor_parallel=2", "engine.num_engines=4")
    assert get_bytes(plan_host(make_14b("sglang.weights=tensor", *ranks)))["weight buckets"] == 4 * 11 * BUCKET


def test_a_bucket_is_no_larger_than_the_weights() -> None:
    inputs = make_14b("sglang.weights=group", "sglang.bucket_mib=1048576")
    assert get_bytes(plan_host(inputs))["weight buckets"] == 8 * 2 * WHOLE


def test_published_adapters_need_a_folder_for_their_base() -> None:
    adapters = ("learner.lora.rank=16", "learner.lora.publish=adapters")
    inputs = make_14b(*adapters)
    slots = count_slot_bytes(inputs.config, inputs.size.total, inputs.run)
    assert WHOLE < slots < 1.1 * WHOLE
    assert list_shared(inputs) == {"published weights": slots, "weights for servers": 2 * WHOLE}


def test_embedded_engines_map_the_slots_and_need_nothing_else() -> None:
    inputs = make_14b("engine.kind=embedded", "engine.kv_tokens=32768", "sglang.colocate=false")
    assert list_shared(inputs) == {"published weights": 2 * WHOLE}
    assert "weight buckets" not in get_bytes(plan_host(inputs))


def test_an_embedded_engine_and_a_rank_on_one_gpu_keep_published_weights_there() -> None:
    shared, alone = (make_1gpu_inputs(f"engine.share_gpu_weights={value}") for value in ("true", "false"))
    with_buffer, without = get_bytes(plan_gpu(shared)), get_bytes(plan_gpu(alone))
    assert with_buffer["published weights"] == 2 * shared.size.total
    assert with_buffer == {**without, "published weights": 2 * shared.size.total}
    assert list_shared(shared) == list_shared(alone)


def test_the_plan_names_the_key_if_a_gpu_has_no_room_for_the_published_weights() -> None:
    fits = make_1gpu_inputs("engine.share_gpu_weights=false")
    needed = plan_gpu(fits)
    assert needed is not None
    machines = replace(fits.machines, gpu=replace(GPUS["h100"], memory_bytes=needed.needed_bytes + 2**20))
    plan = build_plan(make_1gpu_inputs(machines=machines))
    assert {"engine.share_gpu_weights": False} in [change.changes for change in plan.changes]
    (short,) = plan.shortfalls
    assert "engine.share_gpu_weights = false" in describe_remedy(plan, short)


@pytest.mark.parametrize("stage", STAGES)
def test_14b_fits_eight_h100_and_the_plan_prints_the_folders(stage: str) -> None:
    plan = build_plan(make_14b(stage))
    assert plan.shortfalls == []
    assert 70 * GIB < find(plan, "GPU memory").needed_bytes < 80e9
    text = capture(lambda console: console.print(build_plan_tables(plan)), 160)
    assert "weights for servers" in text
    assert "1 folder for all servers of the node, and 1 while an engine restarts" in text


def test_a_transport_without_folders_is_proposed_if_shared_memory_is_short() -> None:
    inputs = make_14b()
    machines = make_machines("h100")
    plan = build_plan(PlanInputs(inputs.run, inputs.config, replace(machines, shared_memory_bytes=64 * GIB)))
    assert [each.name for each in plan.shortfalls] == ["shared memory"]
    assert [change.changes for change in plan.changes] == [{"sglang.weights": "tensor"}]
