"""The info of a server and the requirements of a run, for tests of the server package."""

from pathlib import Path
from typing import Any

import msgspec

from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.sglang import SGLangConfig
from asterism.engine.sglang.http_api import ServerInfo
from asterism.engine.sglang.server.compatibility import ServerRequirements
from tests.engine.sglang.fake_server import INFO


def make_info(**changes: Any) -> ServerInfo:
    own = {
        "model_path": "/models/one",
        "max_total_num_tokens": 8192,
        "page_size": 16,
        "enable_priority_scheduling": True,
    }
    return msgspec.convert(INFO | own | changes, ServerInfo)


def make_requirements(
    model: Path | str = "/models/one", *, engine: EngineConfig | None = None, **sglang: Any
) -> ServerRequirements:
    return ServerRequirements(
        engine or EngineConfig(kind="sglang", kv_tokens=8192), SGLangConfig(**sglang), Path(model), 192
    )
