"""What a server is started with: [engine] and [sglang] as its flags and its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import Engine
from configs.sglang import Sglang
from engine.sglang.command import argv, environment

SCRATCH = Path("/tmp/scratch")


def words(engine: Engine, sglang: Sglang | None = None, index: int = 0) -> list[str]:
    model = Path("/models/one")
    return argv(engine, sglang or Sglang(), model=model, sequence_tokens=192, index=index, version=-1)


def value(flag: str, given: list[str]) -> str:
    """The last one, as the server's argparse takes it."""
    return given[len(given) - given[::-1].index(flag)]


def test_the_engines_keys_are_the_servers_flags():
    engine = Engine(page_tokens=32, prefill_tokens=2048, max_running=64, dtype="bfloat16", kv_tokens=1000)
    given = words(engine)
    assert given[:2] == ["-m", "sglang.launch_server"]
    wanted = {
        "--model-path": "/models/one",
        "--host": "127.0.0.1",
        "--port": "31000",
        "--device": "cpu",
        "--dtype": "bfloat16",
        "--page-size": "32",
        "--chunked-prefill-size": "2048",
        "--max-running-requests": "64",
        "--context-length": "200",  # and those that the server keeps for itself
        "--max-total-tokens": "992",  # whole pages
        "--tp-size": "1",
        "--dp-size": "1",
    }
    assert {flag: value(flag, given) for flag in wanted} == wanted
    assert "--weight-version=-1" in given  # in one word: it looks like a flag
    assert "--mem-fraction-static" not in given


def test_each_server_of_a_machine_has_a_port_and_gpus_of_its_own():
    sglang = Sglang(tensor_parallel=2, data_parallel=2)
    engine = Engine(device="cuda")
    first, second = words(engine, sglang, 0), words(engine, sglang, 1)
    assert [value("--port", given) for given in (first, second)] == ["31000", "31010"]
    assert [value("--base-gpu-id", given) for given in (first, second)] == ["0", "4"]


def test_each_copy_of_the_model_has_its_share_of_the_tokens():
    given = words(Engine(kv_tokens=4096), Sglang(data_parallel=2))
    assert value("--max-total-tokens", given) == "2048"


def test_a_server_without_a_number_of_tokens_takes_its_share_of_the_memory():
    given = words(Engine(kind="sglang", kv_tokens=0), Sglang(memory_share=0.7))
    assert value("--mem-fraction-static", given) == "0.7"
    assert "--max-total-tokens" not in given


def test_what_needs_a_gpu_is_left_out_without_one():
    on_a_cpu, on_cuda = words(Engine()), words(Engine(device="cuda"))
    assert value("--attention-backend", on_a_cpu) == "torch_native"
    assert {"--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle"} <= set(on_a_cpu)
    assert not {"--attention-backend", "--disable-cuda-graph", "--disable-overlap-schedule"} & set(on_cuda)
    assert "--disable-cuda-graph" in words(Engine(device="cuda", cuda_graphs=False))


def test_memory_can_be_given_back_on_a_gpu_alone():
    """Elsewhere a server with that flag does not start."""
    colocated = Sglang(colocate=True)
    assert "--enable-memory-saver" in words(Engine(device="cuda"), colocated)
    assert "--enable-memory-saver" not in [*words(Engine(), colocated), *words(Engine(device="cuda"))]


def test_a_server_streams_what_is_new_sleeps_when_idle_and_lets_run_who_runs():
    flags = {"--incremental-streaming-output", "--sleep-on-idle", "--enable-priority-scheduling"}
    assert flags | {"--disable-priority-preemption"} <= set(words(Engine()))


def test_further_arguments_come_last_and_so_win():
    given = words(Engine(), Sglang(arguments=("--page-size", "1", "--enable-metrics")))
    assert given[-3:] == ["--page-size", "1", "--enable-metrics"]
    assert value("--page-size", given) == "1"


@pytest.mark.parametrize("name", ["TMPDIR", "OMP_NUM_THREADS", "A"])
def test_the_users_environment_wins(name: str):
    own = Sglang(environment={name: "mine"})
    assert environment(Engine(), own, SCRATCH)[name] == "mine"


def test_the_environment_keeps_the_server_to_itself():
    on_a_cpu = environment(Engine(threads=3), Sglang(), SCRATCH)
    assert (on_a_cpu["OMP_NUM_THREADS"], on_a_cpu["TMPDIR"], on_a_cpu["PYTHONSAFEPATH"]) == ("3", "/tmp/scratch", "1")
    assert "TORCHDYNAMO_DISABLE" in on_a_cpu
    assert "TORCHDYNAMO_DISABLE" not in environment(Engine(device="cuda"), Sglang(), SCRATCH)
