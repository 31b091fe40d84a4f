"""Builds the SGLang engine of a run: its server and its weight transport. Imports torch."""

from functools import partial
from pathlib import Path

import torch

from asterism.bus.addresses import parse_generator_index
from asterism.configs.file_manifest import check_top_files
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.engine_code import EngineStart
from asterism.engine.inference.embedded import select_device
from asterism.engine.model.hf_checkpoint import build_empty_model
from asterism.engine.model.lora_options import get_published_adapters
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.server.compatibility import make_requirements
from asterism.engine.sglang.server.external_server import ExternalServer
from asterism.engine.sglang.server.managed_server import SGLangServer
from asterism.engine.sglang.sglang_engine import LONG_STREAM_INTERVAL, SHORT_STREAM_INTERVAL, ServerHandle, SGLangEngine
from asterism.engine.sglang.weights import TransportParts, WeightTransport, build_transport
from asterism.engine.sglang.weights.adapters import AdapterTransport
from asterism.engine.sglang.weights.checksums import ChecksumRegistry
from asterism.engine.weight_transfer.weight_layout import load_layout

MAX_PENDING = 65_536  # turns; the arbiter's leases keep them below this bound


def build_engine(start: EngineStart) -> SGLangEngine:
    """Build the engine of a generator; the server of `generator-N` is named `sglang-N`."""
    run, folder, checkpoint = start.run, start.folder, start.checkpoint
    name, index = start.process.replace("generator", "sglang", 1), parse_generator_index(start.process)
    checksums = ChecksumRegistry(folder.shared_memory / "checksums", name)
    # New weights or the end of a step can interrupt turns, which then keep their tokens.
    may_interrupt = run.rl.max_staleness > 0 or run.rl.group_oversampling > 1
    return SGLangEngine(
        _build_server(start, name, index),
        _build_transport(run, checkpoint, checksums, folder.shared_memory / "for_servers", index),
        model=checkpoint,
        sequence_tokens=run.sequence_tokens,
        version=start.version,
        max_pending=MAX_PENDING,
        stream_interval=SHORT_STREAM_INTERVAL if may_interrupt else LONG_STREAM_INTERVAL,
        connect=partial(SGLangClient, request_timeout_s=run.sglang.request_timeout_s),
        on_engine_lost=start.on_engine_lost,
        keeps_weights=_serves_own_model(run),
    )


def _serves_own_model(run: RunConfig) -> bool:
    """Return whether an evaluation keeps the weights of a running server."""
    return run.evaluation.only and bool(run.sglang.external_urls)


def _build_server(start: EngineStart, name: str, index: int) -> ServerHandle:
    requirements = make_requirements(start.run, start.checkpoint, serves_own_model=_serves_own_model(start.run))
    if start.run.sglang.external_urls:
        return ExternalServer(requirements, index=index, is_restart=start.incarnation > 1)
    check_top_files(start.checkpoint)  # the server reads the files itself
    log, scratch = start.folder.logs / f"{name}.log", start.folder.sockets / name
    return SGLangServer(requirements, log=log, scratch=scratch, index=index, version=start.version)


def _build_transport(
    run: RunConfig, checkpoint: Path, checksums: ChecksumRegistry, node_folder: Path, index: int
) -> WeightTransport | AdapterTransport:
    """`node_folder`: a folder in memory, used by all engines of this node. `index`: the engine's index on the node."""
    dtype: torch.dtype = getattr(torch, run.engine.dtype)
    sglang, device = run.sglang, torch.device("cpu")
    if run.servers.transfer.shares_device:
        device = select_device(run.engine.device, index * sglang.tensor_parallel)
    options = (sglang.bucket_mib << 20, device, sglang.group_backend, sglang.request_timeout_s)
    parts = TransportParts(load_layout(checkpoint, dtype), checksums, node_folder, *options)
    whole = build_transport(sglang.weights, parts)
    lora = get_published_adapters(run.learner)
    if lora is None:
        return whole
    return AdapterTransport(whole, dict(build_empty_model(checkpoint).named_parameters()), lora, dtype)
