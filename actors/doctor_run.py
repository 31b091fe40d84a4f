"""What the run of one configuration needs of this machine, by the keys that say so: `asterism doctor --config FILE`.

The checks are those that the run makes as it starts, and whether its servers' GPUs are enough.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from actors.finding import GIB, Finding, find
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import Run
from engine.checkpoint import load_config
from engine.contract import EngineFailure
from engine.devices import device_of
from engine.sglang.attached import asked, key_of
from engine.sglang.client import SGLangClient
from engine.sglang.command import HOST, environment, port_of
from engine.sglang.fit import ServerUnusable, Wanted, check_fit
from engine.sglang.gpus import Gpu, check_count, check_room, gpus_seen_by
from engine.sglang.interpreter import check_interpreter, wait_for_port
from engine.sglang.protocol import SUPPORTED

ANSWERS_WITHIN_S = 10.0  # of an attached server
MADE_HERE = Path(".venv-sglang/bin/python")  # by `make sglang-environment`


def find_sglang(folder: Path) -> Finding:
    """Where no run is named: whether this interpreter has SGLang, or the one that the Makefile makes."""
    return find("SGLang", lambda: _sglang((sys.executable, str(folder / MADE_HERE))))


def find_for_run(run: Run) -> list[Finding]:
    """Never raises."""
    findings = [find("model.checkpoint", lambda: check_checkpoint(run))]
    if run.engine.kind == "embedded":
        return [*findings, find("engine.device", lambda: check_device(run))]
    if run.sglang.attach:
        places = range(len(run.sglang.attach))
        findings += [find(f"sglang.attach[{place}]", partial(check_attached, run, place)) for place in places]
    else:
        findings += _find_for_servers(run)
    if run.sglang.group_backend == "nccl" and run.sglang.weights == "group":
        findings.append(find("sglang.group_backend", check_nccl))
    return findings


# ---------------------------------------------------------------- any run


def check_checkpoint(run: Run) -> Finding:
    name, folder = "model.checkpoint", checkpoint_of(run)
    if folder is None:
        return Finding(name, "ok", f"{run.model.checkpoint} is made by the run, of [tiny]")
    try:
        config = load_config(folder)
    except UnusableInput as error:
        return Finding(name, "missing", str(error), f"Set {name} to the folder of a model of Qwen3's architecture.")
    return Finding(name, "ok", f"{folder}: {config.num_layers} layers of width {config.hidden_size}")


def checkpoint_of(run: Run) -> Path | None:
    """None where the run makes it, and has not yet."""
    folder = RunFolder(Path(run.runs_folder) / run.name).expand(run.model.checkpoint)
    return None if run.tiny is not None and not folder.exists() else folder


def check_device(run: Run) -> Finding:
    name = "engine.device"
    try:
        devices = {str(device_of(run.engine.device, number)) for number in range(run.engine.num_engines)}
    except UnusableInput as error:
        return Finding(name, "missing", str(error), f'Set {name} to "cpu", or see what is said of the GPU above.')
    return Finding(name, "ok", f"{run.engine.num_engines} engines on {', '.join(sorted(devices))}")


# ---------------------------------------------------------------- servers that the run starts


def _find_for_servers(run: Run) -> list[Finding]:
    python = run.sglang.python or sys.executable
    variables = {**os.environ, **environment(run.engine, run.sglang, Path(tempfile.gettempdir()))}
    gpus: list[Gpu] = []
    findings = [
        find("sglang.python", lambda: check_python(python, variables)),
        find("sglang.port", lambda: check_ports(run)),
        find("GPUs", lambda: check_gpus(run, python, variables, gpus)),
    ]
    if gpus:
        findings.append(find("GPU memory", lambda: check_gpu_memory(run, gpus)))
    return findings


def check_python(python: str, variables: Mapping[str, str]) -> Finding:
    name = "sglang.python"
    try:
        version = asyncio.run(check_interpreter(python, variables))
    except ServerUnusable as error:
        remedy = (
            f"Set {name} to the interpreter of an environment with SGLang {' or '.join(SUPPORTED)}: docs/sglang.md."
        )
        return Finding(name, "missing", str(error), remedy)
    return Finding(name, "ok", f"SGLang {version} of {python}")


def check_ports(run: Run) -> Finding:
    name, taken = "sglang.port", list[str]()
    ports = [port_of(run.sglang, index) for index in range(run.engine.num_engines)]
    for port in ports:
        try:
            asyncio.run(wait_for_port(HOST, port, within_s=0))
        except ServerUnusable as error:
            taken.append(str(error))
    if taken:
        remedy = f"Set {name} so that it and every tenth port after it is free, one for each of engine.num_engines."
        return Finding(name, "missing", "\n".join(taken), remedy)
    return Finding(name, "ok", f"{', '.join(map(str, ports))}: free")


def check_gpus(run: Run, python: str, variables: Mapping[str, str], gpus: list[Gpu]) -> Finding:
    """Those that the servers take are added to `gpus`."""
    name = "GPUs"
    if run.engine.device == "cpu":
        return Finding(name, "ok", 'engine.device = "cpu" needs none')
    try:
        seen = asyncio.run(gpus_seen_by(python, variables))
        gpus += check_count(seen, run.engine, run.sglang)
    except ServerUnusable as error:
        remedy = (
            "Lower engine.num_engines, sglang.tensor_parallel or sglang.data_parallel, or let the server see more GPUs"
            ' (their driver, CUDA_VISIBLE_DEVICES, a torch for CUDA in sglang.python); engine.device = "cpu" needs none.'
        )
        return Finding(name, "missing", str(error), remedy)
    return Finding(name, "ok", "; ".join(f"{gpu.name}, {gpu.total_bytes / GIB:.0f} GiB" for gpu in gpus))


def check_gpu_memory(run: Run, gpus: list[Gpu]) -> Finding:
    name, checkpoint = "GPU memory", checkpoint_of(run)
    if checkpoint is None:
        return Finding(name, "ok", "enough for a model of [tiny]")
    try:
        room = check_room(gpus, _wanted(run, checkpoint))
    except UnusableInput as error:
        remedy = (
            "End what else is on the GPUs, lower engine.kv_tokens or dialogue.response_tokens, raise"
            " sglang.memory_share or sglang.tensor_parallel, or take a smaller model.checkpoint."
        )
        return Finding(name, "missing", str(error), remedy)
    weights, cache = room.weights_bytes / GIB, room.free_bytes / GIB
    return Finding(
        name, "ok", f"{weights:.2f} GiB of weights; room for {room.tokens} tokens beside them in {cache:.1f} GiB"
    )


def check_nccl() -> Finding:
    name = "sglang.group_backend"
    try:
        device = device_of("cuda", 0)
    except UnusableInput:
        detail, remedy = '"nccl" needs a GPU for the generator, and its torch sees none', f'Set {name} to "gloo".'
        return Finding(name, "missing", detail, remedy)
    return Finding(name, "ok", f'"nccl", and {device} for the generator; it must be none of the server\'s')


# ---------------------------------------------------------------- servers that others run


def check_attached(run: Run, place: int) -> Finding:
    key = key_of(run.sglang, place)
    name = key.partition(" ")[0]
    try:
        return asyncio.run(_look_at(run, place, key))
    except (ServerUnusable, EngineFailure) as error:
        remedy = (
            f"Start SGLang {' or '.join(SUPPORTED)} there as docs/sglang.md says, or change the keys that are named."
        )
        return Finding(name, "missing", str(error), remedy)


async def _look_at(run: Run, place: int, key: str) -> Finding:
    name, _, url = key.partition(" = ")
    client = SGLangClient(url, connections=1, request_s=min(run.sglang.request_s, ANSWERS_WITHIN_S))
    try:
        info = await asked(client, key)
    finally:
        await client.close()
    model = checkpoint_of(run) or Path(info.model_path)  # what is not there yet is like nothing that is
    check_fit(info, _wanted(run, model), key)
    room = info.max_total_num_tokens * info.dp_size
    return Finding(name, "ok", f"SGLang {info.version} at {url}, with room for {room} tokens")


def _wanted(run: Run, model: Path) -> Wanted:
    return Wanted(run.engine, run.sglang, model, run.dialogue.sequence_tokens)


# ---------------------------------------------------------------- no run


def _sglang(pythons: tuple[str, ...]) -> Finding:
    for python in pythons:
        try:
            version = asyncio.run(check_interpreter(python, os.environ))
        except ServerUnusable:
            continue
        return Finding("SGLang", "ok", f"{version} of {python}")
    remedy = (
        'Only engine.kind = "sglang" needs it: name the interpreter that has it in sglang.python, and see'
        " docs/sglang.md; on a machine without a GPU `make sglang-environment` installs it."
    )
    return Finding("SGLang", "warning", f"no {' or '.join(SUPPORTED)} of {' or '.join(pythons)}", remedy)
