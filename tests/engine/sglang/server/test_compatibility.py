"""All problems of a server are reported together, each with the key to change."""

import json
from pathlib import Path
from typing import Any

import pytest

from asterism.configs.schema.machines import EngineConfig
from asterism.engine.model.lora_options import LoraOptions
from asterism.engine.sglang.server.compatibility import ServerUnusable, check_compatibility
from tests.engine.sglang.server.requirements import make_info, make_requirements
from tests.engine.tiny_models import save_small_model, small_model
from tests.golden_messages import check_golden_messages


def find_problems(server: object, requirements: object) -> list[str]:
    with pytest.raises(ServerUnusable) as caught:
        check_compatibility(server, requirements, "the server")  # pyright: ignore[reportArgumentType]
    return str(caught.value).splitlines()


def test_a_compatible_server_is_accepted():
    check_compatibility(make_info(), make_requirements(), "the server")


def test_the_context_length_limit_is_exact():
    check_compatibility(make_info(max_req_input_len=192), make_requirements(), "the server")
    assert find_problems(make_info(max_req_input_len=191, context_length=197), make_requirements()) == [
        "dialogue.prompt_tokens + response_tokens = 192: the server accepts at most 191"
        " (its --context-length is 197; 200 is enough)"
    ]


def test_kv_tokens_may_not_exceed_the_capacity_of_all_replicas():
    check_compatibility(make_info(max_total_num_tokens=4096, dp_size=2), make_requirements(), "the server")
    assert find_problems(make_info(max_total_num_tokens=4000, dp_size=2), make_requirements()) == [
        "engine.kv_tokens = 8192: the server has room for 8000; 0 uses all of it"
    ]
    check_compatibility(
        make_info(max_total_num_tokens=64),
        make_requirements(engine=EngineConfig(kind="sglang", kv_tokens=0)),
        "the server",
    )


@pytest.mark.parametrize("transport", ["tensor", "group"])
def test_a_server_with_two_replicas_supports_only_the_disk_transport(transport: str):
    assert find_problems(make_info(dp_size=2), make_requirements(weights=transport)) == [
        f'sglang.weights = "{transport}": the server has 2 model replicas; set sglang.weights = "disk"'
    ]
    check_compatibility(make_info(dp_size=2), make_requirements(weights="disk"), "the server")


def test_a_model_of_the_same_shape_fits_and_a_different_model_does_not(tmp_path: Path):
    models = (small_model(), small_model(seed=1), small_model(vocab_size=98))
    one, alike, other = (save_small_model(tmp_path / f"{number}", model) for number, model in enumerate(models))
    check_compatibility(make_info(model_path=str(alike)), make_requirements(one), "the server")
    assert find_problems(make_info(model_path=str(other)), make_requirements(one)) == [
        f"model.checkpoint = {one}: the server has a different model, {other}"
    ]


def test_an_unreadable_model_is_compared_by_path(tmp_path: Path):
    check_compatibility(
        make_info(model_path="/elsewhere/one/"), make_requirements("/elsewhere/../elsewhere/one"), "the server"
    )
    assert find_problems(make_info(model_path="/elsewhere/two"), make_requirements("/elsewhere/one")) == [
        "model.checkpoint = /elsewhere/one: the server has a different model, /elsewhere/two"
    ]


def test_all_problems_are_reported_together():
    server = make_info(max_req_input_len=10, max_total_num_tokens=16, model_path="/other", dp_size=2)
    problems = find_problems(server, make_requirements(weights="group"))
    assert [line.split(" = ")[0] for line in problems] == [
        "dialogue.prompt_tokens + response_tokens",
        "engine.kv_tokens",
        "model.checkpoint",
        "sglang.weights",
    ]


LORA = LoraOptions(8, 16.0, ("q_proj", "o_proj"))


@pytest.mark.parametrize(
    "limits",
    [
        {"max_lora_rank": 8, "lora_target_modules": ["o_proj", "k_proj"]},  # k_proj includes the whole stack
        {"max_lora_rank": 16, "lora_target_modules": ["qkv_proj", "o_proj", "gate_up_proj"]},
        {"max_lora_rank": None, "lora_target_modules": ["all"]},
        {"max_lora_rank": None, "lora_target_modules": None},
    ],
)
def test_a_server_with_enough_lora_accepts_adapters(limits: dict[str, Any]):
    check_compatibility(make_info(enable_lora=True, **limits), make_requirements()._replace(lora=LORA), "the server")


def test_a_server_that_cannot_load_the_adapters_is_refused_with_the_flag():
    """An input is the options of the server as JSON. With merged weights the same server is accepted."""
    accepted: list[str] = []

    def check(case: str) -> None:
        info = make_info(**{"enable_lora": True} | json.loads(case))
        check_compatibility(info, make_requirements(), "the server")
        accepted.append(case)
        check_compatibility(info, make_requirements()._replace(lora=LORA), "the server")

    check_golden_messages(Path(__file__).parent / "adapter_messages.txt", check, {}, ServerUnusable)
    assert len(accepted) == 5
