"""Tests: the keys of [engine] and [sglang] determine a server's flags and environment."""

from pathlib import Path

import pytest

from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.sglang import SGLangConfig
from asterism.engine.model.lora_options import LoraOptions
from asterism.engine.sglang.server.server_arguments import build_argv, build_environment

SCRATCH = Path("/tmp/scratch")


def build_words(
    engine: EngineConfig, sglang: SGLangConfig | None = None, index: int = 0, lora: LoraOptions | None = None
) -> list[str]:
    model = Path("/models/one")
    return build_argv(
        engine, sglang or SGLangConfig(), model=model, sequence_tokens=192, index=index, version=-1, lora=lora
    )


def get_value(flag: str, given: list[str]) -> str:
    """Return the last value of the flag, because the server's argparse uses the last one."""
    return given[len(given) - given[::-1].index(flag)]


def test_engine_keys_become_server_flags():
    engine = EngineConfig(page_tokens=32, prefill_tokens=2048, max_running=64, dtype="bfloat16", kv_tokens=1000)
    given = build_words(engine)
    assert given[:2] == ["-m", "sglang.launch_server"]
    wanted = {
        **{"--model-path": "/models/one", "--host": "127.0.0.1", "--port": "31000", "--device": "cpu"},
        **{"--dtype": "bfloat16", "--page-size": "32", "--chunked-prefill-size": "2048"},
        "--max-running-requests": "64",
        "--context-length": "200",  # includes the tokens that the server reserves
        "--max-total-tokens": "992",  # a whole number of pages
        "--tp-size": "1",
        "--dp-size": "1",
    }
    assert {flag: get_value(flag, given) for flag in wanted} == wanted
    assert "--weight-version=-1" in given  # flag and value are one word, because the value looks like a flag
    assert "--mem-fraction-static" not in given


def test_servers_on_one_machine_have_different_ports_and_gpus():
    sglang = SGLangConfig(tensor_parallel=2, data_parallel=2)
    engine = EngineConfig(device="cuda")
    first, second = build_words(engine, sglang, 0), build_words(engine, sglang, 1)
    assert [get_value("--port", given) for given in (first, second)] == ["31000", "31010"]
    assert [get_value("--base-gpu-id", given) for given in (first, second)] == ["0", "4"]


def test_kv_tokens_are_divided_among_replicas():
    given = build_words(EngineConfig(kv_tokens=4096), SGLangConfig(data_parallel=2))
    assert get_value("--max-total-tokens", given) == "2048"


def test_a_server_uses_its_memory_share_if_kv_tokens_is_0():
    given = build_words(EngineConfig(kind="sglang", kv_tokens=0), SGLangConfig(memory_share=0.7))
    assert get_value("--mem-fraction-static", given) == "0.7"
    assert "--max-total-tokens" not in given


def test_gpu_features_are_disabled_without_a_gpu():
    on_a_cpu, on_cuda = build_words(EngineConfig()), build_words(EngineConfig(device="cuda"))
    assert get_value("--attention-backend", on_a_cpu) == "torch_native"
    assert {"--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle"} <= set(on_a_cpu)
    assert not {"--attention-backend", "--disable-cuda-graph", "--disable-overlap-schedule"} & set(on_cuda)
    assert "--disable-cuda-graph" in build_words(EngineConfig(device="cuda", cuda_graphs=False))


def test_memory_release_is_enabled_only_on_a_gpu():
    """On a CPU, a server does not start with this flag."""
    colocated = SGLangConfig(colocate=True)
    assert "--enable-memory-saver" in build_words(EngineConfig(device="cuda"), colocated)
    for words in (build_words(EngineConfig(), colocated), build_words(EngineConfig(device="cuda"))):
        assert "--enable-memory-saver" not in words


def test_a_server_streams_increments_and_sleeps_when_idle_and_never_preempts():
    flags = {"--incremental-streaming-output", "--sleep-on-idle", "--enable-priority-scheduling"}
    assert flags | {"--disable-priority-preemption"} <= set(build_words(EngineConfig()))


def test_additional_arguments_override_the_flags():
    given = build_words(EngineConfig(), SGLangConfig(arguments=("--page-size", "1", "--enable-metrics")))
    assert given[-3:] == ["--page-size", "1", "--enable-metrics"]
    assert get_value("--page-size", given) == "1"


@pytest.mark.parametrize("name", ["TMPDIR", "OMP_NUM_THREADS", "A"])
def test_the_environment_of_the_user_overrides_the_defaults(name: str):
    own = SGLangConfig(environment={name: "mine"})
    assert build_environment(EngineConfig(), own, SCRATCH)[name] == "mine"


def test_the_environment_isolates_the_server():
    on_a_cpu = build_environment(EngineConfig(threads=3), SGLangConfig(), SCRATCH)
    assert (on_a_cpu["OMP_NUM_THREADS"], on_a_cpu["TMPDIR"], on_a_cpu["PYTHONSAFEPATH"]) == ("3", "/tmp/scratch", "1")
    assert "TORCHDYNAMO_DISABLE" in on_a_cpu
    assert "TORCHDYNAMO_DISABLE" not in build_environment(EngineConfig(device="cuda"), SGLangConfig(), SCRATCH)


def test_a_server_for_adapters_has_room_for_the_base_and_one_adapter():
    lora = LoraOptions(8, 16.0, ("v_proj", "down_proj"))
    given = build_words(EngineConfig(), lora=lora)
    assert "--enable-lora" in given
    assert (get_value("--max-lora-rank", given), get_value("--max-loras-per-batch", given)) == ("8", "2")
    start = given.index("--lora-target-modules") + 1
    assert given[start : start + 4] == ["v_proj", "down_proj", "q_proj", "k_proj"]
    assert get_value("--lora-backend", given) == "torch_native"
    assert "--lora-backend" not in build_words(EngineConfig(device="cuda"), lora=lora)
    assert "--enable-lora" not in build_words(EngineConfig())
