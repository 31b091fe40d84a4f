"""Tests: all problems of a server are reported together, and each report names the key to change."""

import json
from pathlib import Path
from typing import Any

import pytest

from asterism.configs.schema.machines import EngineConfig
from asterism.engine.model.lora_options import LoraOptions
from asterism.engine.sglang.server.compatibility import ServerRequirements, ServerUnusable, check_compatibility
from tests.engine.sglang.server.requirements import make_info, make_requirements
from tests.engine.tiny_models import save_small_model, small_model
from tests.golden_messages import check_golden_messages

LORA = LoraOptions(8, 16.0, ("q_proj", "o_proj"))
WITH_LORA = make_requirements()._replace(lora=LORA)


@pytest.mark.parametrize(
    ("server", "requirements"),
    [
        ({}, make_requirements()),
        ({"max_req_input_len": 192}, make_requirements()),
        ({"max_total_num_tokens": 4096, "dp_size": 2}, make_requirements(weights="disk")),  # total of all replicas
        ({"max_total_num_tokens": 64}, make_requirements(engine=EngineConfig(kind="sglang", kv_tokens=0))),
        ({"model_path": "/elsewhere/one/"}, make_requirements("/elsewhere/../elsewhere/one")),
        # k_proj stands for the whole stack of q, k and v
        ({"max_lora_rank": 8, "lora_target_modules": ["o_proj", "k_proj"]}, WITH_LORA),
        ({"max_lora_rank": 16, "lora_target_modules": ["qkv_proj", "o_proj", "gate_up_proj"]}, WITH_LORA),
        ({"max_lora_rank": None, "lora_target_modules": ["all"]}, WITH_LORA),
        ({"max_lora_rank": None, "lora_target_modules": None}, WITH_LORA),
    ],
    ids=["plain", "context", "replicas", "own capacity", "unreadable", "stack", "fused", "all modules", "no limits"],
)
def test_a_compatible_server_is_accepted(server: dict[str, Any], requirements: ServerRequirements):
    check_compatibility(make_info(enable_lora=requirements.lora is not None, **server), requirements, "the server")


def test_only_a_model_of_the_same_shape_is_accepted(tmp_path: Path):
    models = (small_model(), small_model(seed=1), small_model(vocab_size=98))
    one, alike, other = (save_small_model(tmp_path / f"{number}", model) for number, model in enumerate(models))
    check_compatibility(make_info(model_path=str(alike)), make_requirements(one), "the server")
    with pytest.raises(ServerUnusable) as caught:
        check_compatibility(make_info(model_path=str(other)), make_requirements(one), "the server")
    assert str(caught.value) == f"model.checkpoint = {one}: the server has a different model, {other}"


def test_the_error_for_an_incompatible_server_names_the_key_or_the_flag():
    accepted: list[str] = []

    def check(case: str) -> None:
        kind, _, options = case.partition(": ")
        given = json.loads(options)
        if kind == "run":
            requirements = make_requirements(given.get("model", "/models/one"), **given.get("sglang", {}))
            check_compatibility(make_info(**given["server"]), requirements, "the server")
        info = make_info(**{"enable_lora": True} | given)
        check_compatibility(info, make_requirements(), "the server")
        accepted.append(case)
        check_compatibility(info, WITH_LORA, "the server")

    check_golden_messages(Path(__file__).parent / "compatibility_messages.txt", check, {}, ServerUnusable)
    assert len(accepted) == 5
