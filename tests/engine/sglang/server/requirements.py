"""A server's info and a run's requirements, for tests of the server package."""

from pathlib import Path
from typing import Any

from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.sglang import SGLangConfig
from asterism.engine.sglang.http_api import ServerInfo
from asterism.engine.sglang.server.compatibility import ServerRequirements


def make_info(**changes: Any) -> ServerInfo:
    fields: dict[str, Any] = {
        **{"version": "0.5.23", "model_path": "/models/one", "max_total_num_tokens": 8192, "max_req_input_len": 250},
        **{"context_length": 256, "page_size": 16, "dp_size": 1, "tp_size": 1, "device": "cpu", "dtype": "float32"},
        **{"quantization": None, "enable_dp_attention": False, "enable_deterministic_inference": True},
        **{"enable_priority_scheduling": True, "disable_radix_cache": False, "enable_lora": None},
        "max_lora_rank": None,
        "lora_target_modules": None,
    }
    return ServerInfo(**fields | changes)


def make_requirements(
    model: Path | str = "/models/one", *, engine: EngineConfig | None = None, **sglang: Any
) -> ServerRequirements:
    return ServerRequirements(
        engine or EngineConfig(kind="sglang", kv_tokens=8192), SGLangConfig(**sglang), Path(model), 192
    )
