"""The table [sglang] and `engine.kind = "sglang"` have these valid values and error messages."""

from pathlib import Path

import pytest

from asterism.configs.load import list_differences, load_run, write_resolved
from asterism.configs.loading.config_layers import ConfigError
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.sglang import SGLangConfig

BASE = ("name=a", "engine.kind=sglang")


def load_error(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run(None, overrides)
    return str(caught.value)


def load(*overrides: str) -> RunConfig:
    return load_run(None, [*BASE, *overrides])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            'external_urls=["127.0.0.1:31000"]',
            'external_urls must hold base URLs, such as "http://127.0.0.1:31000": "127.0.0.1:31000"',
        ),
        (
            'external_urls=["http://a/v1"]',
            'external_urls must hold base URLs, such as "http://127.0.0.1:31000": "http://a/v1"',
        ),
        ('external_urls=["http://a", "http://a"]', "external_urls must not name a server twice"),
        ('arguments=["--port=1"]', "arguments must not set --port, which the run sets"),
        ('arguments=["--host", "0.0.0.0"]', "arguments must not set --host, which the run sets"),
        ('environment={"A=B"="1"}', 'environment must name variables: "A=B"'),
        ('environment={""="1"}', 'environment must name variables: ""'),
    ],
)
def test_an_invalid_value_is_refused_by_key(override: str, message: str):
    assert load_error(*BASE, f"sglang.{override}") == f"--set sglang.{override}: `sglang`: {message}"


def test_the_environment_is_a_table_with_arbitrary_keys(tmp_path: Path):
    (tmp_path / "my.toml").write_text('name = "a"\n[sglang.environment]\nCUDA_VISIBLE_DEVICES = "0"\nA = "x"\n')
    run = load_run(tmp_path / "my.toml", ["sglang.environment.A=y"])
    assert run.sglang.environment == {"CUDA_VISIBLE_DEVICES": "0", "A": "y"}
    write_resolved(run, tmp_path / "resolved.toml")
    assert load_run(tmp_path / "resolved.toml") == run


def test_a_variable_is_a_string_even_if_it_resembles_a_number(tmp_path: Path):
    assert load("sglang.environment.A=1").sglang.environment == {"A": "1"}
    (tmp_path / "my.toml").write_text('name = "a"\n[sglang.environment]\nA = 1\n')
    with pytest.raises(ConfigError, match=r"`sglang.environment\[...\]` must be a string, got an integer$"):
        load_run(tmp_path / "my.toml")


def test_differences_include_variables_that_only_one_run_sets():
    a, b = (
        RunConfig(name="a", sglang=SGLangConfig(environment={"A": "1"})),
        RunConfig(name="a", sglang=SGLangConfig(environment={"B": "2"})),
    )
    assert list_differences(a, b) == ['sglang.environment.A: "1" -> nothing', 'sglang.environment.B: nothing -> "2"']


NCCL = ("sglang.weights=group", "sglang.group_backend=nccl")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("sglang.data_parallel=2", "sglang.weights=tensor"), '`sglang`: weights must be "disk" if data_parallel = 2'),
        (("sglang.data_parallel=2", "sglang.weights=group"), '`sglang`: weights must be "disk" if data_parallel = 2'),
        (
            ("engine.num_engines=2", 'sglang.external_urls=["http://a:1"]'),
            "sglang.external_urls must name one server per engine, engine.num_engines = 2, or none: it names 1",
        ),
        (
            ("cluster.key=my.key", 'sglang.external_urls=["http://gpu7:30000"]'),
            "sglang.external_urls must name servers on 127.0.0.1, one set per node, if cluster.key is set: "
            "http://gpu7:30000",
        ),
        (("sglang.port=65530",), "sglang.port must leave 10 ports below 65536"),
        (("engine.num_engines=2", "sglang.port=65526"), "engine.num_engines = 2 servers: 65526"),
        (NCCL, 'sglang.group_backend = "nccl" needs engine.device = "cuda"'),
        (
            ("engine.kind=embedded", "engine.kv_tokens=0"),
            "kv_tokens must be positive; 0 leaves it to the server if kind =",
        ),
        (("engine.kv_tokens=-1",), "`engine.kv_tokens` must be an integer >= 0"),
        # A server needs spare tokens, in each of its caches, besides the longest trajectory.
        (("engine.kv_tokens=9216",), "= 9216, and 8 that a server reserves"),
        (("engine.kv_tokens=9232", "sglang.data_parallel=2"), "2 times, for sglang.data_parallel"),
        (("determinism=strict", "rl.prompts=8"), 'determinism = "strict" needs engine.kind = "embedded" ('),
        (("sglang.colocate=true", "rl.max_staleness=1"), "sglang.colocate = true needs rl.max_staleness = 0"),
        (("sglang.colocate=true", "engine.kind=embedded"), 'sglang.colocate = true needs engine.kind = "sglang"'),
        (
            ("sglang.colocate=true", 'sglang.external_urls=["http://localhost:30000"]'),
            "external_urls must be empty if colocate = true",
        ),
        (
            ("learner.memory.offload=between_steps",),
            'learner.memory.offload = "between_steps" needs sglang.colocate = true',
        ),
        (
            ("learner.memory.offload=optimizer", "sft.steps=1", "sft.optimizer=muon"),
            'learner.memory.offload = "optimizer" needs sft.optimizer = "adamw"',
        ),
        (
            ("learner.lora.publish=adapters",),
            'publish = "adapters" needs adapters: set rank, or publish = "merged"',
        ),
        (
            ("learner.lora.publish=adapters", "learner.lora.rank=4", "sglang.data_parallel=2"),
            'learner.lora.publish = "adapters" needs sglang.data_parallel = 1',
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_both_keys(overrides: tuple[str, ...], message: str):
    assert message in load_error(*BASE, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ("sglang.data_parallel=2",),
        ("engine.num_engines=2", 'sglang.external_urls=["http://a:1", "http://a:2"]'),
        ("cluster.key=my.key", 'sglang.external_urls=["http://localhost:30000/"]'),
        ('sglang.external_urls=["http://gpu7:30000"]',),
        ("sglang.port=65526",),
        (*NCCL, "engine.device=cuda"),
        ("sglang.group_backend=nccl",),  # unused without weights = "group"
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
def test_settings_that_agree_are_accepted(overrides: tuple[str, ...]):
    load(*overrides)
