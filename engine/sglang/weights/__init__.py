"""Transports new weights to an SGLang server: a folder, request bodies, a process group, or handles of memory.

Each transport pauses the server's requests in place, loads the weights and resumes the requests.
Their next tokens have the new version; they keep their KV cache, which later requests must not
reuse. While requests are paused, the server cannot flush its cache: /flush_cache returns 400, and
an update with `flush_cache` is reported as failed although the weights are loaded. So every
request has an `extra_key` that names its weights, and the prefix cache matches only requests with
the same key. If no request is paused, the cache is flushed.

Before requests resume, the server must confirm the version, and its checksums must match
(checksums.py).
"""

from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from asterism.bus.messages import WeightsPublished
from asterism.configs.sglang_options import SGLangConfig
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.weights.checksums import ChecksumRegistry
from asterism.engine.weight_transfer.weight_layout import WeightLayout


class TransportParts(NamedTuple):
    """The arguments of `build`, which each transport of asterism.configs.engines.weight_transfers has."""

    layout: WeightLayout
    checksums: ChecksumRegistry
    node_folder: Path  # in memory, used by all engines of this node
    device: torch.device  # the server's first one, as this process numbers it
    options: SGLangConfig

    @property
    def bucket_bytes(self) -> int:
        return self.options.bucket_mib << 20


class WeightTransport(Protocol):
    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        """Raises WeightsRefused if the server keeps its old weights and resumes.

        Raises another EngineFailure if the weights are partially loaded or the server does not
        respond. Its requests stay paused until it is restarted, or until a complete update and a
        resume.
        """
        ...

    async def close(self) -> None: ...


def build_extra_key(weights: WeightsPublished) -> str:
    """Return the key of requests that are sent after an update to these weights."""
    return f"{weights.version}-{weights.digest}"
