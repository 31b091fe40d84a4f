"""[sglang] and `engine.kind = "sglang"`: what is taken, and what is answered to a value that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import ConfigError, differences, load_resolved, load_run, write_resolved
from configs.schema import Run
from configs.sglang import Sglang

BASE = ("name=a", "engine.kind=sglang")


def complaint(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run(None, overrides)
    return str(caught.value)


def loaded(*overrides: str) -> Run:
    return load_run(None, [*BASE, *overrides])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tensor_parallel=0", "tensor_parallel must be positive"),
        ("data_parallel=0", "data_parallel must be positive"),
        ("start_s=0", "start_s must be positive"),
        ("request_s=-1", "request_s must be positive"),
        ("ready_s=0", "ready_s must be positive"),
        ("bucket_mib=0", "bucket_mib must be positive"),
        ("memory_share=0", "memory_share must lie in (0, 1)"),
        ("memory_share=1", "memory_share must lie in (0, 1)"),
        ("port=80", "port must lie between 1024 and 65535: 80"),
        (
            'attach=["127.0.0.1:31000"]',
            'attach must hold base URLs, such as "http://127.0.0.1:31000": "127.0.0.1:31000"',
        ),
        ('attach=["http://a/v1"]', 'attach must hold base URLs, such as "http://127.0.0.1:31000": "http://a/v1"'),
        ('attach=["http://a", "http://a"]', "attach must not name a server twice"),
        ('arguments=["--port=1"]', "arguments must leave --port to the run"),
        ('arguments=["--host", "0.0.0.0"]', "arguments must leave --host to the run"),
        ('environment={"A=B"="1"}', 'environment must name variables: "A=B"'),
        ('environment={""="1"}', 'environment must name variables: ""'),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_key(override: str, said: str):
    assert complaint(*BASE, f"sglang.{override}") == f"--set sglang.{override}: `sglang`: {said}"


@pytest.mark.parametrize("way", ["tensor", "group"])
def test_a_server_with_several_copies_of_the_model_takes_weights_from_the_disk_alone(way: str):
    said = complaint(*BASE, "sglang.data_parallel=2", f"sglang.weights={way}")
    assert '`sglang`: weights must be "disk" where data_parallel = 2' in said
    assert loaded("sglang.data_parallel=2").sglang.weights == "disk"


def test_the_environment_is_a_table_of_names_of_the_users_own(tmp_path: Path):
    (tmp_path / "my.toml").write_text('name = "a"\n[sglang.environment]\nCUDA_VISIBLE_DEVICES = "0"\nA = "x"\n')
    run = load_run(tmp_path / "my.toml", ["sglang.environment.A=y"])
    assert run.sglang.environment == {"CUDA_VISIBLE_DEVICES": "0", "A": "y"}
    write_resolved(run, tmp_path / "resolved.toml")
    assert load_resolved(tmp_path / "resolved.toml") == run


def test_a_variable_is_text_and_looks_like_a_number_where_it_is_one(tmp_path: Path):
    assert loaded("sglang.environment.A=1").sglang.environment == {"A": "1"}
    (tmp_path / "my.toml").write_text('name = "a"\n[sglang.environment]\nA = 1\n')
    with pytest.raises(ConfigError, match=r"`sglang.environment\[...\]` must be a string, got an integer$"):
        load_run(tmp_path / "my.toml")


def test_names_that_only_one_of_two_runs_has_are_among_their_differences():
    a, b = Run(name="a", sglang=Sglang(environment={"A": "1"})), Run(name="a", sglang=Sglang(environment={"B": "2"}))
    assert differences(a, b) == ['sglang.environment.A: "1" -> nothing', 'sglang.environment.B: nothing -> "2"']


def test_each_engine_has_a_server_to_attach_to_or_none_has():
    said = complaint(*BASE, "engine.num_engines=2", 'sglang.attach=["http://a:1"]')
    assert (
        "sglang.attach must name a server for each engine, engine.num_engines = 2, or none at all: it names 1" in said
    )
    assert loaded("engine.num_engines=2", 'sglang.attach=["http://a:1", "http://a:2"]').engine.num_engines == 2


def test_nodes_attach_to_servers_of_their_own_alone():
    said = complaint(*BASE, "cluster.key=my.key", 'sglang.attach=["http://gpu7:30000"]')
    assert "sglang.attach must name servers of 127.0.0.1" in said
    assert "http://gpu7:30000" in said
    assert loaded("cluster.key=my.key", 'sglang.attach=["http://localhost:30000/"]').cluster.key == "my.key"
    assert loaded('sglang.attach=["http://gpu7:30000"]').sglang.attach == ("http://gpu7:30000",)


def test_the_servers_ports_are_ports():
    assert "sglang.port must leave 10 ports below 65536" in complaint(*BASE, "sglang.port=65530")
    assert loaded("sglang.port=65526").sglang.port == 65_526
    assert "engine.num_engines = 2 servers: 65526" in complaint(*BASE, "sglang.port=65526", "engine.num_engines=2")


def test_tensors_of_a_cpu_do_not_travel_by_nccl():
    nccl = ("sglang.weights=group", "sglang.group_backend=nccl")
    assert 'sglang.group_backend = "nccl" needs engine.device = "cuda"' in complaint(*BASE, *nccl)
    assert loaded(*nccl, "engine.device=cuda").sglang.group_backend == "nccl"
    assert loaded("sglang.group_backend=nccl").sglang.weights == "disk"  # where it counts for nothing


class TestRoom:
    def test_only_a_server_may_be_left_to_find_out_its_capacity(self):
        assert loaded("engine.kv_tokens=0").engine.kv_tokens == 0
        assert 'kv_tokens must be positive; 0 leaves it to the server, where kind = "sglang"' in complaint(
            "name=a", "engine.kv_tokens=0"
        )
        assert "kv_tokens must be positive" in complaint(*BASE, "engine.kv_tokens=-1")

    def test_a_server_needs_some_tokens_more_than_the_longest_trajectory(self):
        assert load_run(None, ["name=a", "engine.kv_tokens=9216"]).engine.kv_tokens == 9216
        assert "= 9216, and 8 that a server keeps for itself" in complaint(*BASE, "engine.kv_tokens=9216")
        assert loaded("engine.kv_tokens=9232").engine.kv_tokens == 9232

    def test_a_trajectory_fits_into_each_of_the_caches_that_a_server_has(self):
        assert "2 times, for sglang.data_parallel" in complaint(
            *BASE, "engine.kv_tokens=9232", "sglang.data_parallel=2"
        )
        assert loaded("engine.kv_tokens=18464", "sglang.data_parallel=2").sglang.data_parallel == 2


def test_a_strict_run_needs_the_embedded_engine():
    said = complaint(*BASE, "determinism=strict", "rl.prompts=8")
    assert 'determinism = "strict" needs engine.kind = "embedded" (' in said


def test_memory_is_given_back_where_no_engine_generates_while_the_learner_trains():
    colocated = "sglang.colocate=true"
    assert loaded(colocated).sglang.colocate
    said = complaint(*BASE, colocated, "rl.max_staleness=1")
    assert "sglang.colocate = true needs rl.max_staleness = 0" in said
    said = complaint(*BASE, colocated, "engine.kind=embedded")
    assert 'sglang.colocate = true needs engine.kind = "sglang"' in said
    said = complaint(*BASE, colocated, 'sglang.attach=["http://localhost:30000"]')
    assert "attach must name no server where colocate = true" in said
