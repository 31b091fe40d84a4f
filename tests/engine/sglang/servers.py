"""What tests of the server's side have in common: a server's answer, and what a run wants of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.schema import Engine
from configs.sglang import Sglang
from engine.sglang.fit import Wanted
from engine.sglang.protocol import ServerInfo


def info(**changes: Any) -> ServerInfo:
    fields: dict[str, Any] = {
        "version": "0.5.23",
        "model_path": "/models/one",
        "max_total_num_tokens": 8192,
        "max_req_input_len": 250,
        "context_length": 256,
        "page_size": 16,
        "dp_size": 1,
        "tp_size": 1,
        "device": "cpu",
        "enable_deterministic_inference": True,
        "enable_priority_scheduling": True,
        "incremental_streaming_output": False,
        "disable_radix_cache": False,
    }
    return ServerInfo(**fields | changes)


def wanted(model: Path | str = "/models/one", *, engine: Engine | None = None, **sglang: Any) -> Wanted:
    return Wanted(engine or Engine(kind="sglang", kv_tokens=8192), Sglang(**sglang), Path(model), 192)
