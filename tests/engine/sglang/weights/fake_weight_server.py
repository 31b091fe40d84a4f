"""An in-process fake of SGLangClient with a server that loads weights."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from engine.sglang.errors import UpdateRefused
from engine.sglang.http_api import ModelInfo, ParallelismInfo, RankChecksums, ServerInfo


class FakeWeightServer:
    """`calls`: all calls so far. `refused`: by call, messages with which the next calls are
    refused."""

    def __init__(self, *, dp_size: int = 1, tp_size: int = 1) -> None:
        self.calls: list[str] = []
        self.refused: dict[str, list[str]] = {}
        self.loaded: dict[str, Tensor] = {}
        self.version = "default"
        self.has_paused_requests = False
        self.leaves_during_broadcast = False  # leaves the group instead of taking part
        self.stays_silent = False  # neither takes part in a broadcast nor responds
        self.groups: dict[str, ProcessGroupGloo] = {}
        self.weights = self  # the server also implements WeightUpdateClient
        self._sizes = (dp_size, tp_size)
        self._open = False

    async def get_server_info(self) -> ServerInfo:
        dp_size, tp_size = self._sizes
        return ServerInfo("0.5.23", "/model", 1, 1, 1, 1, dp_size, tp_size, "cpu", False, False, False, False)

    async def get_model_info(self) -> ModelInfo:
        return ModelInfo("/model", self.version)

    async def compute_checksums(self) -> list[RankChecksums]:
        content = b"".join(self.loaded[name].view(torch.uint8).numpy().tobytes() for name in sorted(self.loaded))
        return [RankChecksums({}, hashlib.sha256(content).hexdigest(), [ParallelismInfo(0, 0)])]

    async def pause(self, mode: str) -> None:
        self._record(f"pause {mode}")

    async def resume(self) -> None:
        self._record("resume")

    async def flush_cache(self) -> bool:
        self._record("flush")
        return not self.has_paused_requests

    async def begin_update(self) -> None:
        if self._open:
            raise UpdateRefused("a weight-update session is already open; call end_weight_update() first")
        self._record("begin")
        self._open = True

    async def end_update(self) -> None:
        self._record("end")
        self._open = False

    async def update_from_disk(self, folder: Path, version: str, *, flush_cache: bool) -> None:
        self._record("disk")
        assert not flush_cache
        self.loaded = load_file(folder / "model.safetensors")
        self.version = version

    async def update_from_tensor(
        self, payloads: Sequence[bytes], version: str | None, *, load_format: str | None, flush_cache: bool
    ) -> None:
        self._record("tensor")
        assert self._open
        assert not flush_cache
        assert len(payloads) == self._sizes[1]
        self._store(dict(pickle.loads(payloads[-1])), version)

    async def init_group(
        self, host: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        self._record("init")
        assert (rank_offset, backend) == (1, "gloo")

        def join() -> None:
            store = PrefixStore(name, TCPStore(host, port, world_size, timeout=timedelta(seconds=20)))
            prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", store))
            self.groups[name] = ProcessGroupGloo(prefixed, 1, world_size, timedelta(seconds=20))

        await asyncio.to_thread(join)

    async def update_from_group(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        version: str | None,
        *,
        flush_cache: bool,
    ) -> None:
        self._record("group")
        assert self._open
        assert not flush_cache
        if self.stays_silent:
            await asyncio.Event().wait()
        if self.leaves_during_broadcast:
            self.groups.clear()
        if group not in self.groups:
            raise UpdateRefused(f"Failed to receive weights: Group {group} not in {list(self.groups)}")
        weights = [
            torch.empty(list(shape), dtype=getattr(torch, dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        try:
            await asyncio.to_thread(self._receive, weights, self.groups[group])
        except RuntimeError as error:
            raise UpdateRefused(f"Failed to receive weights: {error}") from None
        self._store(dict(zip(names, weights, strict=True)), version)

    async def destroy_group(self, name: str) -> None:
        self._record("destroy")
        if self.groups.pop(name, None) is None:
            raise UpdateRefused("The group to be destroyed does not exist.")

    def leave(self) -> None:
        """Closes this side of every group."""
        self.groups.clear()

    def _receive(self, weights: Sequence[Tensor], group: Any) -> None:
        for work in [group.broadcast(weight, 0) for weight in weights]:
            work.wait()

    def _store(self, weights: Mapping[str, Tensor], version: str | None) -> None:
        self.loaded.update(weights)
        if version is not None:
            self.version = version

    def _record(self, call: str) -> None:
        self.calls.append(call)
        if messages := self.refused.get(call):
            raise UpdateRefused(messages.pop(0))
