"""The embedded engine as a run's configuration wants it. Imports torch, which most processes do without."""

from __future__ import annotations

from pathlib import Path

import torch

from configs.schema import Run
from engine.contract import Capacity
from engine.devices import device_of
from engine.embedded import EmbeddedEngine


def embedded_engine(run: Run, checkpoint: Path, *, kv_tokens: int, index: int = 0, version: int = 0) -> EmbeddedEngine:
    """`index` is the engine's among those of the machine, `version` that of the checkpoint's weights."""
    engine = run.engine
    return EmbeddedEngine(
        checkpoint,
        Capacity(kv_tokens, engine.page_tokens, run.dialogue.sequence_tokens),
        threads=engine.threads,
        prefill_tokens=engine.prefill_tokens,
        max_running=engine.max_running,
        dtype=getattr(torch, engine.dtype),
        device=device_of(engine.device, index),
        cuda_graphs=engine.cuda_graphs,
        version=version,
        strict=run.determinism == "strict",
    )
