"""Builds the SGLang engine from the run's configuration: its server and weight transport. Imports
torch."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import assert_never

import torch

from asterism.bus.addresses import parse_generator_index
from asterism.configs.integrity.file_manifest import check_top_files
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema import RunConfig
from asterism.configs.sglang_options import SGLangConfig
from asterism.engine.inference.embedded import select_device
from asterism.engine.model.hf_checkpoint import build_empty_model
from asterism.engine.model.lora.lora_options import get_published_adapters
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.server.compatibility import ServerRequirements
from asterism.engine.sglang.server.external_server import ExternalServer
from asterism.engine.sglang.server.managed_server import SGLangServer
from asterism.engine.sglang.sglang_engine import LONG_STREAM_INTERVAL, SHORT_STREAM_INTERVAL, ServerHandle, SGLangEngine
from asterism.engine.sglang.weights import WeightTransport
from asterism.engine.sglang.weights.adapters import AdapterTransport
from asterism.engine.sglang.weights.checksums import ChecksumRegistry
from asterism.engine.sglang.weights.disk_transport import DiskTransport
from asterism.engine.sglang.weights.ipc_transport import IpcTransport
from asterism.engine.sglang.weights.transports import ProcessGroupTransport, TensorTransport
from asterism.engine.weight_transfer.weight_layout import WeightLayout, load_layout

MAX_PENDING = 65_536  # turns; the arbiter's leases keep them below this bound


def build_sglang_engine(
    run: RunConfig,
    checkpoint: Path,
    folder: RunFolder,
    process: str,
    *,
    version: int,
    on_engine_lost: Callable[[str], object],
    incarnation: int = 1,
) -> SGLangEngine:
    """The engine of the generator `process`; the server of `generator-N` is named `sglang-N`.

    `version`: of the checkpoint's weights. `incarnation`: counts the generator's starts.
    """
    name, index = process.replace("generator", "sglang", 1), parse_generator_index(process)
    checksums = ChecksumRegistry(folder.shared_memory / "checksums", name)
    # New weights or the end of a step can interrupt turns, which then keep their tokens.
    may_interrupt = run.rl.max_staleness > 0 or run.rl.group_oversampling > 1
    return SGLangEngine(
        _build_server(run, checkpoint, folder, name, index, version, incarnation),
        _build_transport(run, checkpoint, checksums, folder.shared_memory / "for_servers", index),
        model=checkpoint,
        sequence_tokens=run.sequence_tokens,
        version=version,
        max_pending=MAX_PENDING,
        stream_interval=SHORT_STREAM_INTERVAL if may_interrupt else LONG_STREAM_INTERVAL,
        connect=partial(SGLangClient, request_timeout_s=run.sglang.request_timeout_s),
        on_engine_lost=on_engine_lost,
        keeps_weights=_serves_own_model(run),
    )


def _serves_own_model(run: RunConfig) -> bool:
    """Whether a running server is evaluated with the weights that it has."""
    return run.evaluation.only and bool(run.sglang.external_urls)


def _build_server(
    run: RunConfig, checkpoint: Path, folder: RunFolder, name: str, index: int, version: int, incarnation: int
) -> ServerHandle:
    lora = get_published_adapters(run.learner)
    requirements = ServerRequirements(
        *(run.engine, run.sglang, checkpoint, run.sequence_tokens, lora),
        serves_own_model=_serves_own_model(run),
        sequence_keys=run.sequence_keys,
    )
    if run.sglang.external_urls:
        return ExternalServer(requirements, index=index, is_restart=incarnation > 1)
    check_top_files(checkpoint)  # the server reads the files itself
    log, scratch = folder.logs / f"{name}.log", folder.sockets / name
    return SGLangServer(requirements, log=log, scratch=scratch, index=index, version=version)


def _build_transport(
    run: RunConfig, checkpoint: Path, checksums: ChecksumRegistry, node_folder: Path, index: int
) -> WeightTransport | AdapterTransport:
    """`node_folder`: in memory, used by all engines of this node. `index`: of the engine on this node."""
    dtype: torch.dtype = getattr(torch, run.engine.dtype)
    device = torch.device("cpu")
    if run.sglang.weights == "ipc":
        device = select_device(run.engine.device, index * run.sglang.tensor_parallel)
    whole = _build_whole_transport(run.sglang, load_layout(checkpoint, dtype), checksums, node_folder, device)
    lora = get_published_adapters(run.learner)
    if lora is None:
        return whole
    return AdapterTransport(whole, dict(build_empty_model(checkpoint).named_parameters()), lora, dtype)


def _build_whole_transport(
    sglang: SGLangConfig, layout: WeightLayout, checksums: ChecksumRegistry, node_folder: Path, device: torch.device
) -> WeightTransport:
    match sglang.weights:
        case "disk":
            return DiskTransport(layout, checksums, node_folder)
        case "tensor":
            return TensorTransport(layout, checksums, sglang.bucket_mib << 20)
        case "ipc":
            return IpcTransport(layout, checksums, sglang.bucket_mib << 20, device)
        case "group":
            return ProcessGroupTransport(
                layout, checksums, sglang.bucket_mib << 20, sglang.group_backend, timeout_s=sglang.request_timeout_s
            )
        case _:
            assert_never(sglang.weights)
