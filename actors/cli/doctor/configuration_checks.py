"""`asterism doctor --config FILE`: checks what the run of one configuration needs, by key.

The run makes the same checks at its start, except those of GPU count and memory.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from actors.cli.doctor.finding import GIB, CheckResult, DoctorFinding, run_check
from actors.launch.input_checks import list_input_checks
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from engine.contract import EngineFailure
from engine.inference.embedded import select_device
from engine.model.hf_checkpoint import check_weight_shapes, load_model_config
from engine.sglang.client import SGLangClient
from engine.sglang.http_api import SUPPORTED_VERSIONS
from engine.sglang.server.compatibility import ServerRequirements, ServerUnusable, check_compatibility
from engine.sglang.server.external_server import fetch_server_info, format_config_key
from engine.sglang.server.gpu_check import VisibleGpu, check_gpu_count, check_memory_budget, query_gpu_inventory
from engine.sglang.server.interpreter_check import check_interpreter, wait_for_free_port
from engine.sglang.server.server_arguments import HOST, build_environment, compute_port

EXTERNAL_SERVER_TIMEOUT_S = 10.0
_OK = DoctorFinding("ok", "")
_VERSIONS = " or ".join(SUPPORTED_VERSIONS)
LOCAL_SGLANG_PYTHON = Path(".venv-sglang/bin/python")  # created by `make sglang-environment`


def check_run(run: RunConfig) -> dict[str, DoctorFinding]:
    """By configuration key. Never raises."""
    remedy = "Set model.checkpoint to the folder of a model with the Qwen3 architecture."
    remedies = {"model.checkpoint": remedy, "space": "Free some space, or use a smaller model.checkpoint."}
    findings = {
        key: run_check(check, remedies.get(key, f"Change {key}, or repair the file that it names."))
        for key, check in list_input_checks(run).items()
    }
    if findings.get("model.checkpoint", _OK).status == "ok":
        findings["model.checkpoint"] = run_check(lambda: check_checkpoint(run), remedy)
    if run.engine.kind == "embedded":
        remedy = 'Set engine.device to "cpu", or follow the remedy for the GPU above.'
        return findings | {"engine.device": run_check(lambda: check_device(run), remedy)}
    if run.sglang.external_urls:
        remedy = f"Start SGLang {_VERSIONS} there as in docs/sglang.md, or change the keys named above."
        for index in range(len(run.sglang.external_urls)):
            check = partial(check_external_server, run, index)
            findings[f"sglang.external_urls[{index}]"] = run_check(check, remedy)
    else:
        findings |= _check_servers(run)
    if run.sglang.group_backend == "nccl" and run.sglang.weights == "group":
        findings["sglang.group_backend"] = run_check(check_nccl, 'Set sglang.group_backend to "gloo".')
    return findings


# ---------------------------------------------------------------- any run


def check_checkpoint(run: RunConfig) -> str:
    folder = resolve_checkpoint(run)
    if folder is None:
        return f"{run.model.checkpoint} will be created by the run ([tiny])"
    config = load_model_config(folder)
    check_weight_shapes(folder)
    return f"{folder}: {config.num_layers} layers of width {config.hidden_size}"


def resolve_checkpoint(run: RunConfig) -> Path | None:
    """None if the run itself creates the checkpoint and has not done so yet."""
    folder = RunFolder(Path(run.runs_folder) / run.name).expand_path(run.model.checkpoint)
    return None if run.tiny is not None and not folder.exists() else folder


def check_device(run: RunConfig) -> str:
    devices = {str(select_device(run.engine.device, number)) for number in range(run.engine.num_engines)}
    return f"{run.engine.num_engines} engines on {', '.join(sorted(devices))}"


# ---------------------------------------------------------------- managed servers


def _check_servers(run: RunConfig) -> dict[str, DoctorFinding]:
    python = run.sglang.python or sys.executable
    variables = {**os.environ, **build_environment(run.engine, run.sglang, Path(tempfile.gettempdir()))}
    gpus: list[VisibleGpu] = []
    findings = {
        "sglang.python": run_check(
            lambda: f"SGLang {asyncio.run(check_interpreter(python, variables))} in {python}",
            f"Set sglang.python to the Python of an environment with SGLang {_VERSIONS}: see docs/sglang.md.",
        ),
        "sglang.port": run_check(
            lambda: check_ports(run),
            "Set sglang.port so that this port and every tenth after it are free, one per engine (engine.num_engines).",
        ),
        "GPUs": run_check(
            lambda: check_gpus(run, python, variables, gpus),
            "Lower engine.num_engines, sglang.tensor_parallel or sglang.data_parallel, or make more GPUs visible"
            ' (driver, CUDA_VISIBLE_DEVICES, a CUDA torch in sglang.python); engine.device = "cpu" needs none.',
        ),
    }
    if gpus:
        remedy = (
            "Stop other programs on the GPUs, lower engine.kv_tokens or dialogue.response_tokens, raise"
            " sglang.memory_share or sglang.tensor_parallel, or use a smaller model.checkpoint."
        )
        findings["GPU memory"] = run_check(lambda: check_gpu_memory(run, gpus), remedy)
    return findings


def check_ports(run: RunConfig) -> str:
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


def check_gpus(run: RunConfig, python: str, variables: Mapping[str, str], gpus: list[VisibleGpu]) -> str:
    """Appends the GPUs that the servers would use to `gpus`."""
    if run.engine.device == "cpu":
        return 'engine.device = "cpu" needs none'
    seen = asyncio.run(query_gpu_inventory(python, variables))
    gpus += check_gpu_count(seen, run.engine, run.sglang)
    return "; ".join(f"{gpu.name}, {gpu.total_bytes / GIB:.0f} GiB" for gpu in gpus)


def check_gpu_memory(run: RunConfig, gpus: list[VisibleGpu]) -> str:
    checkpoint = resolve_checkpoint(run)
    if checkpoint is None:
        return "enough for the model of [tiny]"
    room = check_memory_budget(gpus, _get_server_requirements(run, checkpoint))
    weights, cache = room.weights_bytes / GIB, room.free_bytes / GIB
    return f"{weights:.2f} GiB of weights; the other {cache:.1f} GiB hold {room.max_cache_tokens} tokens"


def check_nccl() -> str:
    try:
        device = select_device("cuda", 0)
    except UnusableInput as error:
        raise UnusableInput('"nccl" needs a GPU for the generator, but its torch finds none') from error
    return f'"nccl", and {device} for the generator; the server must not use the same GPU'


# ---------------------------------------------------------------- external servers


def check_external_server(run: RunConfig, index: int) -> str:
    try:
        return asyncio.run(_probe_external_server(run, index))
    except EngineFailure as error:
        raise ServerUnusable(str(error)) from error


async def _probe_external_server(run: RunConfig, index: int) -> str:
    key, url = format_config_key(run.sglang, index), run.sglang.external_urls[index].rstrip("/")
    timeout_s = min(run.sglang.request_timeout_s, EXTERNAL_SERVER_TIMEOUT_S)
    client = SGLangClient(url, max_in_flight=1, request_timeout_s=timeout_s)
    try:
        info = await fetch_server_info(client, key)
    finally:
        await client.close()
    # A checkpoint that the run has yet to create cannot differ from the server's model.
    model = resolve_checkpoint(run) or Path(info.model_path)
    check_compatibility(info, _get_server_requirements(run, model), key)
    room = info.max_total_num_tokens * info.dp_size
    return f"SGLang {info.version} at {url}, with a KV cache of {room} tokens"


def _get_server_requirements(run: RunConfig, model: Path) -> ServerRequirements:
    return ServerRequirements(run.engine, run.sglang, model, run.dialogue.sequence_tokens)


# ---------------------------------------------------------------- without a run


def check_sglang(folder: Path) -> CheckResult:
    """Checks for SGLang in this interpreter and in the Makefile's environment."""
    pythons = (sys.executable, str(folder / LOCAL_SGLANG_PYTHON))
    for python in pythons:
        with contextlib.suppress(ServerUnusable):
            return f"{asyncio.run(check_interpreter(python, os.environ))} in {python}"
    remedy = (
        'For engine.kind = "sglang", set sglang.python to an interpreter with SGLang (see docs/sglang.md);'
        " on a machine without a GPU `make sglang-environment` installs it."
    )
    return DoctorFinding("warning", f"no version {_VERSIONS} in {' or '.join(pythons)}", remedy)
