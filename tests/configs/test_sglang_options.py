"""Valid values of [sglang] and of `engine.kind = "sglang"`."""

from pathlib import Path

import pytest

from asterism.configs.load import list_differences, load_run, write_resolved
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.sglang import SGLangConfig

BASE = ("name=a", "engine.kind=sglang")


def load(*overrides: str) -> RunConfig:
    return load_run(None, [*BASE, *overrides])


def test_the_environment_table_can_have_any_keys(tmp_path: Path):
    (tmp_path / "my.toml").write_text('name = "a"\n[sglang.environment]\nCUDA_VISIBLE_DEVICES = "0"\nA = "x"\n')
    run = load_run(tmp_path / "my.toml", ["sglang.environment.A=y"])
    assert run.sglang.environment == {"CUDA_VISIBLE_DEVICES": "0", "A": "y"}
    write_resolved(run, tmp_path / "resolved.toml")
    assert load_run(tmp_path / "resolved.toml") == run


def test_a_variable_is_a_string_even_if_it_resembles_a_number():
    assert load("sglang.environment.A=1").sglang.environment == {"A": "1"}


def test_differences_include_variables_that_only_one_run_sets():
    a, b = (
        RunConfig(name="a", sglang=SGLangConfig(environment={"A": "1"})),
        RunConfig(name="a", sglang=SGLangConfig(environment={"B": "2"})),
    )
    assert list_differences(a, b) == ['sglang.environment.A: "1" -> nothing', 'sglang.environment.B: nothing -> "2"']


NCCL = ("sglang.weights=group", "sglang.group_backend=nccl")


@pytest.mark.parametrize(
    "overrides",
    [
        ("sglang.data_parallel=2",),
        ("engine.num_engines=2", 'sglang.external_urls=["http://a:1", "http://a:2"]'),
        ("cluster.key=my.key", 'sglang.external_urls=["http://localhost:30000/"]'),
        ('sglang.external_urls=["http://gpu7:30000"]',),
        ("sglang.port=65526",),
        (*NCCL, "engine.device=cuda"),
        ("sglang.group_backend=nccl",),  # this key has no effect without weights = "group"
        ("engine.kv_tokens=0",),
        ("engine.kv_tokens=9232",),
        ("engine.kv_tokens=18464", "sglang.data_parallel=2"),
        ("engine.kind=embedded", "engine.kv_tokens=9216"),
        ("sglang.colocate=true",),
        ("sglang.colocate=true", "learner.memory.offload=between_steps"),
        ("sglang.colocate=true", "learner.memory.offload=optimizer"),
        ("learner.lora.rank=4",),
        ("learner.lora.rank=4", "learner.lora.publish=adapters"),
        ("learner.lora.rank=4", "learner.lora.publish=adapters", "engine.kind=embedded", "sglang.data_parallel=2"),
        ("learner.memory.offload=optimizer", "sft.steps=0", "sft.optimizer=muon"),
    ],
)
def test_compatible_settings_are_accepted(overrides: tuple[str, ...]):
    load(*overrides)
