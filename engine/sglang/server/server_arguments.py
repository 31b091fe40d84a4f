"""Builds the command line and environment of one SGLang server from [engine] and [sglang]."""

from collections.abc import Mapping
from pathlib import Path

from asterism.configs.loading.secret_references import resolve_references
from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.sglang import PORTS_PER_SERVER, SPARE_TOKENS, SGLangConfig
from asterism.engine.model.lora_options import LoraOptions
from asterism.engine.sglang.weights.adapters import complete_stacks

HOST = "127.0.0.1"
_COMMON_ARGUMENTS = (
    # Queued requests are scheduled by priority; running requests are never preempted.
    *("--enable-priority-scheduling", "--disable-priority-preemption"),
    "--incremental-streaming-output",  # without the flag, each piece of a stream repeats all earlier tokens
    *("--log-level-http", "warning"),  # at other levels, every load poll writes a log line
    "--sleep-on-idle",  # without the flag, an idle scheduler uses a full core
)
# Select the implementations that work without a GPU.
CPU_ARGUMENTS = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule"),
)


def compute_port(sglang: SGLangConfig, index: int) -> int:
    return sglang.port + PORTS_PER_SERVER * index


def build_argv(
    engine: EngineConfig,
    sglang: SGLangConfig,
    *,
    model: Path,
    sequence_tokens: int,
    index: int,
    version: int,
    lora: LoraOptions | None = None,
) -> list[str]:
    """Return the arguments of the interpreter. `version`: version of the model's weights. `sequence_tokens`:
    the longest sequence; the server must be able to generate its last token. `lora`: the adapters
    that the server receives."""
    return [
        *("-m", "sglang.launch_server", "--model-path", str(model)),
        *("--host", HOST, "--port", str(compute_port(sglang, index)), f"--weight-version={version}"),
        *("--device", engine.device, "--dtype", engine.dtype),
        *("--tp-size", str(sglang.tensor_parallel), "--dp-size", str(sglang.data_parallel)),
        *("--context-length", str(sequence_tokens + SPARE_TOKENS)),
        *("--page-size", str(engine.page_tokens), "--chunked-prefill-size", str(engine.prefill_tokens)),
        *("--max-running-requests", str(engine.max_running), *_build_cache_arguments(engine, sglang)),
        # No request uses constrained output.
        *("--grammar-backend", "none", "--skip-server-warmup", *_COMMON_ARGUMENTS),
        *(() if lora is None else _build_lora_arguments(lora, engine.device)),
        *(CPU_ARGUMENTS if engine.device == "cpu" else _build_cuda_arguments(engine, index, sglang)),
        *sglang.arguments,
    ]


def build_environment(engine: EngineConfig, sglang: SGLangConfig, scratch: Path) -> Mapping[str, str]:
    """Return variables to add to the run's environment. `scratch`: the folder for temporary files.

    Raises UnusableInput if a reference cannot be resolved.
    """
    # Compiling the few compiled functions would take a minute.
    cpu_variables = {"TORCHDYNAMO_DISABLE": "1"} if engine.device == "cpu" else {}
    return {
        "OMP_NUM_THREADS": str(engine.threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # prevents imports from the working directory
        # A server with another value waits a minute after its scheduler died.
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
        "TMPDIR": str(scratch),
        **cpu_variables,
        **resolve_references(sglang.environment, "sglang.environment").table,
    }


def _build_lora_arguments(lora: LoraOptions, device: str) -> tuple[str, ...]:
    """Allow one adapter and the base per batch: all requests name the same adapter; health checks need the base."""
    backend = ("--lora-backend", "torch_native") if device == "cpu" else ()
    return (*list_lora_flags(lora), "--max-loras-per-batch", "2", *backend)


def list_lora_flags(lora: LoraOptions) -> tuple[str, ...]:
    """Return the flags that a server needs to load these adapters."""
    return ("--enable-lora", "--max-lora-rank", str(lora.rank), "--lora-target-modules", *complete_stacks(lora.targets))


def _build_cache_arguments(engine: EngineConfig, sglang: SGLangConfig) -> tuple[str, str]:
    if engine.kv_tokens == 0:
        return "--mem-fraction-static", str(sglang.memory_share)
    tokens = engine.kv_tokens // sglang.data_parallel  # KV tokens of each model replica
    return "--max-total-tokens", str(tokens // engine.page_tokens * engine.page_tokens)


def _build_cuda_arguments(engine: EngineConfig, index: int, sglang: SGLangConfig) -> tuple[str, ...]:
    """Select consecutive GPUs for the servers of one machine."""
    first = ("--base-gpu-id", str(index * sglang.tensor_parallel * sglang.data_parallel))
    graphs = () if engine.cuda_graphs else ("--disable-cuda-graph",)
    return (*first, *graphs, *(("--enable-memory-saver",) if sglang.colocate else ()))
