"""Transports new weights to an SGLang server: by a folder, request bodies, a process group, or handles of memory.

Each transport pauses the server's requests in place, loads the weights and resumes the requests.
The requests' next tokens have the new version. The requests keep their KV cache, which later requests must not reuse,
and the server cannot flush its cache while requests are paused: /flush_cache returns 400, and
an update with `flush_cache` is reported as failed although the weights are loaded. So every request
has an `extra_key` that names its weights, and the prefix cache matches only requests with the same
key. If no request is paused, the transport flushes the cache.

Before requests resume, the server must confirm the version, and its checksums must match
(checksums.py).
"""

import pkgutil
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch

from asterism.bus.messages import WeightsPublished
from asterism.configs.choices.weight_transfers import WEIGHT_TRANSFERS
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.weights.checksums import ChecksumRegistry
from asterism.engine.weight_transfer.weight_layout import WeightLayout


class TransportParts(NamedTuple):
    """The arguments of each transport in asterism.configs.choices.weight_transfers."""

    layout: WeightLayout
    checksums: ChecksumRegistry
    node_folder: Path = Path()  # a folder in memory, used by all engines of this run on this node
    bucket_bytes: int = 2**20
    device: torch.device = torch.device("cpu")  # the server's first device, as this process numbers it
    group_backend: Literal["gloo", "nccl"] = "gloo"
    timeout_s: float = 300.0  # limit of joining a group, and of each bucket
    response_timeout_s: float = 10.0  # time for the server to report an error after this side has left the group


class WeightTransport(Protocol):
    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        """Load the weights. Raises WeightsRefused if the server keeps its old weights and resumes.

        Raises another EngineFailure if the weights are partially loaded or the server does not
        respond. Requests stay paused until the server restarts, or until a complete update and a resume.
        """
        ...

    async def close(self) -> None: ...


def build_transport(name: str, parts: TransportParts) -> WeightTransport:
    """Return a new transport. `name`: a value of sglang.weights."""
    return pkgutil.resolve_name(WEIGHT_TRANSFERS[name].transport)(parts)


def build_extra_key(weights: WeightsPublished) -> str:
    """Return the key of requests that are sent after an update to these weights."""
    return f"{weights.version}-{weights.digest}"
