"""The command line and the environment of one SGLang server, as [engine] and [sglang] want it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from configs.schema import Engine
from configs.sglang import PORTS, SPARE_TOKENS, Sglang

HOST = "127.0.0.1"
_ALWAYS = (
    *("--enable-priority-scheduling", "--disable-priority-preemption"),  # who waits has a rank; who runs is let run
    "--incremental-streaming-output",  # else each piece of a stream repeats all before it
    *("--log-level-http", "warning"),  # else every look at its load is a line of its log
    "--sleep-on-idle",  # else a scheduler that has nothing to do takes a core
)
# Without a GPU: what is left of attention, sampling and scheduling. `--grammar-backend none`: no output is held to a form.
_ON_A_CPU = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule"),
)


def port_of(sglang: Sglang, index: int) -> int:
    return sglang.port + PORTS * index


def argv(engine: Engine, sglang: Sglang, *, model: Path, sequence_tokens: int, index: int, version: int) -> list[str]:
    """Everything behind the interpreter. `version` is that of the model's weights; `sequence_tokens` the longest
    sequence, the last token of which the server has to be able to add."""
    return [
        *("-m", "sglang.launch_server", "--model-path", str(model)),
        *("--host", HOST, "--port", str(port_of(sglang, index)), f"--weight-version={version}"),
        *("--device", engine.device, "--dtype", engine.dtype),
        *("--tp-size", str(sglang.tensor_parallel), "--dp-size", str(sglang.data_parallel)),
        *("--context-length", str(sequence_tokens + SPARE_TOKENS)),
        *("--page-size", str(engine.page_tokens), "--chunked-prefill-size", str(engine.prefill_tokens)),
        *("--max-running-requests", str(engine.max_running), *_room(engine, sglang)),
        *("--grammar-backend", "none", "--skip-server-warmup", *_ALWAYS),
        *(_ON_A_CPU if engine.device == "cpu" else _on_cuda(engine, index, sglang)),
        *sglang.arguments,
    ]


def environment(engine: Engine, sglang: Sglang, scratch: Path) -> Mapping[str, str]:
    """What is added to the run's own; `scratch` is for temporary files."""
    on_a_cpu = {"TORCHDYNAMO_DISABLE": "1"} if engine.device == "cpu" else {}  # what little is compiled takes a minute
    return {
        "OMP_NUM_THREADS": str(engine.threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # the run's folder is not a place to import from
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",  # else a server whose scheduler has died lingers for a minute
        "TMPDIR": str(scratch),
        **on_a_cpu,
        **sglang.environment,
    }


def _room(engine: Engine, sglang: Sglang) -> tuple[str, str]:
    if engine.kv_tokens == 0:
        return "--mem-fraction-static", str(sglang.memory_share)
    tokens = engine.kv_tokens // sglang.data_parallel  # of each copy of the model
    return "--max-total-tokens", str(tokens // engine.page_tokens * engine.page_tokens)


def _on_cuda(engine: Engine, index: int, sglang: Sglang) -> tuple[str, ...]:
    """Servers of one machine take its GPUs one after the other."""
    first = ("--base-gpu-id", str(index * sglang.tensor_parallel * sglang.data_parallel))
    graphs = () if engine.cuda_graphs else ("--disable-cuda-graph",)
    return (*first, *graphs, *(("--enable-memory-saver",) if sglang.colocate else ()))
