"""Builds the embedded engine from the run's configuration. Imports torch."""

from collections.abc import Iterator
from pathlib import Path

import torch

from asterism.bus.addresses import parse_generator_index
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.contract import Capacity
from asterism.engine.engine_code import EngineCheck, EngineStart
from asterism.engine.inference.embedded import EmbeddedEngine, select_device
from asterism.engine.model.lora_options import get_published_adapters


def build_embedded_engine(
    run: RunConfig, checkpoint: Path, *, kv_tokens: int, index: int = 0, version: int = 0, sequence_tokens: int = 0
) -> EmbeddedEngine:
    """`index`: the engine's index on its machine. `version`: version of the checkpoint's weights. `sequence_tokens`:
    default is the run's value."""
    engine = run.engine
    return EmbeddedEngine(
        checkpoint,
        Capacity(kv_tokens, engine.page_tokens, sequence_tokens or run.sequence_tokens),
        threads=engine.threads,
        prefill_tokens=engine.prefill_tokens,
        max_running=engine.max_running,
        dtype=getattr(torch, engine.dtype),
        device=select_device(engine.device, index),
        cuda_graphs=engine.cuda_graphs,
        version=version,
        strict=run.determinism == "strict",
        lora=get_published_adapters(run.learner),
    )


def build_engine(start: EngineStart) -> EmbeddedEngine:
    kv_tokens, index = start.run.engine.kv_tokens, parse_generator_index(start.process)
    return build_embedded_engine(start.run, start.checkpoint, kv_tokens=kv_tokens, index=index, version=start.version)


def list_machine_checks(run: RunConfig, checkpoint: Path | None) -> Iterator[EngineCheck]:
    remedy = 'Set engine.device to "cpu", or follow the remedy for the GPU above.'
    yield EngineCheck("engine.device", lambda: _check_device(run), remedy)


def _check_device(run: RunConfig) -> str:
    devices = {str(select_device(run.engine.device, number)) for number in range(run.engine.num_engines)}
    return f"{run.engine.num_engines} engines on {', '.join(sorted(devices))}"
