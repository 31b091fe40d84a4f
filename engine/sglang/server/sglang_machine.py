"""Checks of `asterism doctor` for SGLang: interpreters, ports and GPUs of this machine, and external servers."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from asterism.configs.errors import GIB, UnusableInput, format_bytes
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.contract import EngineFailure
from asterism.engine.engine_code import EngineCheck, EvaluatedModels
from asterism.engine.inference.embedded import select_device
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import SUPPORTED_VERSIONS
from asterism.engine.sglang.server.compatibility import ServerUnusable, check_compatibility, make_requirements
from asterism.engine.sglang.server.external_server import fetch_server_info, format_config_key
from asterism.engine.sglang.server.gpu_check import (
    VisibleGpu,
    check_gpu_count,
    check_memory_budget,
    query_gpu_inventory,
)
from asterism.engine.sglang.server.interpreter_check import check_interpreter, wait_for_free_port
from asterism.engine.sglang.server.server_arguments import HOST, build_environment, compute_port

EXTERNAL_SERVER_TIMEOUT_S = 10.0
_VERSIONS = " or ".join(SUPPORTED_VERSIONS)


def list_machine_checks(run: RunConfig, checkpoint: Path | None) -> Iterator[EngineCheck]:
    if run.sglang.external_urls:
        remedy = f"Start SGLang {_VERSIONS} there as in docs/sglang.md, or change the keys named above."
        for index in range(len(run.sglang.external_urls)):
            check = partial(_check_external_server, run, checkpoint, index)
            yield EngineCheck(f"sglang.external_urls[{index}]", lambda check=check: asyncio.run(check()), remedy)
    else:
        yield from _list_server_checks(run, checkpoint)
    if run.sglang.group_backend == "nccl" and run.servers.transfer.joins_group:
        nccl = ("nccl", "a GPU for the generator", "the generator; the server must not use the same GPU")
        check = partial(_check_generator_gpu, *nccl)
        yield EngineCheck("sglang.group_backend", check, 'Set sglang.group_backend to "gloo".')
    if run.servers.transfer.shares_device and run.engine.device == "cuda":
        ipc = ("ipc", "the GPU of the server in the generator", "the first generator")
        yield EngineCheck("sglang.weights", partial(_check_generator_gpu, *ipc), 'Set sglang.weights to "disk".')


# ---------------------------------------------------------------- managed servers


def _list_server_checks(run: RunConfig, checkpoint: Path | None) -> Iterator[EngineCheck]:
    python = run.sglang.python or sys.executable
    try:
        variables = {**os.environ, **build_environment(run.engine, run.sglang, Path(tempfile.gettempdir()))}
    except UnusableInput:  # sglang.environment is wrong, which a check of its own reports
        return
    yield EngineCheck(
        "sglang.python",
        lambda: f"SGLang {asyncio.run(check_interpreter(python, variables))} in {python}",
        f"Set sglang.python to the Python of an environment with SGLang {_VERSIONS}: see docs/sglang.md.",
    )
    yield EngineCheck(
        "sglang.port",
        lambda: _check_ports(run),
        "Set sglang.port so that this port and every tenth after it are free, one per engine (engine.num_engines).",
    )
    gpus: list[VisibleGpu] = []
    yield EngineCheck(
        "GPUs",
        lambda: _check_gpus(run, python, variables, gpus),
        "Lower engine.num_engines, sglang.tensor_parallel or sglang.data_parallel, or make more GPUs visible"
        ' (driver, CUDA_VISIBLE_DEVICES, a CUDA torch in sglang.python); engine.device = "cpu" needs none.',
    )
    if gpus:
        remedy = (
            "Stop other programs on the GPUs, lower engine.kv_tokens or dialogue.response_tokens, raise"
            " sglang.memory_share or sglang.tensor_parallel, or use a smaller model.checkpoint."
        )
        yield EngineCheck("GPU memory", lambda: _check_gpu_memory(run, checkpoint, gpus), remedy)


def _check_ports(run: RunConfig) -> str:
    taken: list[str] = []
    ports = [compute_port(run.sglang, index) for index in range(run.engine.num_engines)]
    for port in ports:
        try:
            asyncio.run(wait_for_free_port(HOST, port, timeout_s=0))
        except ServerUnusable as error:
            taken.append(str(error))
    if taken:
        raise ServerUnusable("\n".join(taken))
    return f"{', '.join(map(str, ports))}: free"


def _check_gpus(run: RunConfig, python: str, variables: Mapping[str, str], gpus: list[VisibleGpu]) -> str:
    """Check the number of GPUs; append the GPUs that the servers would use to `gpus`."""
    if run.engine.device == "cpu":
        return 'engine.device = "cpu" needs none'
    seen = asyncio.run(query_gpu_inventory(python, variables))
    gpus += check_gpu_count(seen, run.engine, run.sglang)
    return "; ".join(f"{gpu.name}, {gpu.total_bytes / GIB:.0f} GiB" for gpu in gpus)


def _check_gpu_memory(run: RunConfig, checkpoint: Path | None, gpus: list[VisibleGpu]) -> str:
    if checkpoint is None:
        return "enough for a model that the run makes"
    room = check_memory_budget(gpus, make_requirements(run, checkpoint))
    weights, cache = format_bytes(room.weights_bytes), format_bytes(room.free_bytes)
    return f"{weights} of weights; the other {cache} hold {room.max_cache_tokens} tokens"


def _check_generator_gpu(transport: str, need: str, note: str) -> str:
    try:
        device = select_device("cuda", 0)
    except UnusableInput as error:
        raise UnusableInput(f'"{transport}" needs {need}, but its torch finds none') from error
    return f'"{transport}", and {device} for {note}'


# ---------------------------------------------------------------- external servers


async def _check_external_server(run: RunConfig, checkpoint: Path | None, index: int) -> str:
    key, url = format_config_key(run.sglang, index), run.sglang.external_urls[index].rstrip("/")
    timeout_s = min(run.sglang.request_timeout_s, EXTERNAL_SERVER_TIMEOUT_S)
    client = SGLangClient(url, max_in_flight=1, request_timeout_s=timeout_s)
    try:
        info = await fetch_server_info(client, key)
    finally:
        await client.close()
    # Without the checkpoint, which the run has yet to create, the server's model is compared with itself.
    model = checkpoint or Path(info.model_path)
    check_compatibility(info, make_requirements(run, model), key)
    room = info.max_total_num_tokens * info.dp_size
    return f"SGLang {info.version} at {url}, with a KV cache of {room} tokens"


# ---------------------------------------------------------------- evaluations


def find_models(run: RunConfig) -> EvaluatedModels:
    """Find the models of the running servers. Raises UnusableInput, which names the server."""
    return EvaluatedModels(run, {"servers": asyncio.run(ask_servers(run.sglang.external_urls))})


async def ask_servers(urls: Sequence[str]) -> dict[str, object]:
    """Return the model of each server, by URL."""
    models: dict[str, object] = {}
    for url in urls:
        async with SGLangClient(url, retry_delays_s=()) as client:
            try:
                models[url] = msgspec.to_builtins(await client.get_model_info())
            except EngineFailure as failure:
                raise UnusableInput(f"{url}: {failure}") from None
    return models
