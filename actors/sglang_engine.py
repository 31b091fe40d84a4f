"""The SGLang engine as a run's configuration wants it: its server, and the way of new weights to it. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import assert_never

import torch

from actors.wiring import index_of
from configs.run_folder import RunFolder
from configs.schema import Run
from configs.sglang import Sglang
from engine.sglang.attached import AttachedServer
from engine.sglang.client import SGLangClient
from engine.sglang.engine import OFTEN, SELDOM, Server, SGLangEngine
from engine.sglang.fit import Wanted
from engine.sglang.server import SGLangServer
from engine.sglang.weights import WeightsWay
from engine.sglang.weights.checksums import Checksums
from engine.sglang.weights.disk import DiskWeights
from engine.sglang.weights.group import GroupWeights
from engine.sglang.weights.published import PublishedLayout
from engine.sglang.weights.tensor import TensorWeights

MAX_PENDING = 65_536  # turns, of which SGLangClient sends a part; the arbiter's leases hold them below that


def sglang_engine(
    run: Run,
    checkpoint: Path,
    folder: RunFolder,
    process: str,
    *,
    version: int,
    lost: Callable[[str], object],
    life: int = 1,
) -> SGLangEngine:
    """Of the generator `process`, whose server is `sglang-N` where that is `generator-N`; `life` counts its starts.
    `version` is that of the checkpoint's weights; `lost` as of SGLangEngine."""
    name, index = process.replace("generator", "sglang", 1), index_of(process)
    layout = PublishedLayout(checkpoint, getattr(torch, run.engine.dtype))
    checksums = Checksums(folder.shared_memory / "checksums", name)
    return SGLangEngine(
        _server(run, checkpoint, folder, name, index, version, life),
        _weights_way(run.sglang, layout, checksums, folder.shared_memory / name),
        model=checkpoint,
        sequence_tokens=run.dialogue.sequence_tokens,
        version=version,
        max_pending=MAX_PENDING,
        stream_interval=OFTEN if _looks_into_turns(run) else SELDOM,
        connect=partial(SGLangClient, request_s=run.sglang.request_s),
        lost=lost,
    )


def _looks_into_turns(run: Run) -> bool:
    """New weights come in the middle of turns, or a step's end aborts some: what those have is kept."""
    return run.rl.max_staleness > 0 or run.rl.oversubscribe > 1


def _server(run: Run, checkpoint: Path, folder: RunFolder, name: str, index: int, version: int, life: int) -> Server:
    wanted = Wanted(run.engine, run.sglang, checkpoint, run.dialogue.sequence_tokens)
    if run.sglang.attach:
        return AttachedServer(wanted, index=index, again=life > 1)
    log, scratch = folder.logs / f"{name}.log", folder.sockets / name
    return SGLangServer(wanted, log=log, scratch=scratch, index=index, version=version)


def _weights_way(sglang: Sglang, layout: PublishedLayout, checksums: Checksums, scratch: Path) -> WeightsWay:
    """`scratch`: a folder in memory, of this engine alone."""
    match sglang.weights:
        case "disk":
            return DiskWeights(layout, checksums, scratch)
        case "tensor":
            return TensorWeights(layout, checksums, sglang.bucket_mib << 20)
        case "group":
            return GroupWeights(
                layout, checksums, sglang.bucket_mib << 20, sglang.group_backend, timeout_s=sglang.request_s
            )
        case _:
            assert_never(sglang.weights)
