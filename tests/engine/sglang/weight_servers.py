"""A stand-in for a server that takes weights: it answers the calls of SGLangClient that the ways make, in this process."""

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
from engine.sglang.protocol import ModelInfo, RankChecksums, RankPlace, ServerInfo


class WeightServer:
    """`calls` are those that it has had. What is in `refused` is refused by that message, once for each in the list."""

    def __init__(self, *, dp_size: int = 1, tp_size: int = 1) -> None:
        self.calls: list[str] = []
        self.refused: dict[str, list[str]] = {}
        self.loaded: dict[str, Tensor] = {}
        self.version = "default"
        self.holds_requests = False
        self.leaves_during_broadcast = False  # it goes away where it should take part
        self.stays_silent = False  # it neither takes part in a broadcast nor answers
        self.groups: dict[str, ProcessGroupGloo] = {}
        self._sizes = (dp_size, tp_size)
        self._open = False

    async def server_info(self) -> ServerInfo:
        dp_size, tp_size = self._sizes
        return ServerInfo("0.5.23", "/model", 1, 1, 1, 1, dp_size, tp_size, "cpu", False, False, False, False)

    async def model_info(self) -> ModelInfo:
        return ModelInfo("/model", self.version)

    async def checksums(self) -> list[RankChecksums]:
        content = b"".join(self.loaded[name].view(torch.uint8).numpy().tobytes() for name in sorted(self.loaded))
        return [RankChecksums({}, hashlib.sha256(content).hexdigest(), [RankPlace(0, 0)])]

    async def pause(self, mode: str) -> None:
        self._note(f"pause {mode}")

    async def resume(self) -> None:
        self._note("resume")

    async def flush_cache(self) -> bool:
        self._note("flush")
        return not self.holds_requests

    async def begin_update(self) -> None:
        if self._open:
            raise UpdateRefused("a weight-update session is already open; call end_weight_update() first")
        self._note("begin")
        self._open = True

    async def end_update(self) -> None:
        self._note("end")
        self._open = False

    async def update_from_disk(self, folder: Path, version: str, *, flush_cache: bool) -> None:
        self._note("disk")
        assert not flush_cache
        self.loaded = load_file(folder / "model.safetensors")
        self.version = version

    async def update_from_tensor(
        self, payloads: Sequence[bytes], version: str | None, *, load_format: str | None, flush_cache: bool
    ) -> None:
        self._note("tensor")
        assert self._open
        assert not flush_cache
        assert len(payloads) == self._sizes[1]
        self._take(dict(pickle.loads(payloads[-1])), version)

    async def init_group(
        self, host: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        self._note("init")
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
        self._note("group")
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
        self._take(dict(zip(names, weights, strict=True)), version)

    async def destroy_group(self, name: str) -> None:
        self._note("destroy")
        if self.groups.pop(name, None) is None:
            raise UpdateRefused("The group to be destroyed does not exist.")

    def leave(self) -> None:
        """Its end of every group is closed."""
        self.groups.clear()

    def _receive(self, weights: Sequence[Tensor], group: Any) -> None:
        for work in [group.broadcast(weight, 0) for weight in weights]:
            work.wait()

    def _take(self, weights: Mapping[str, Tensor], version: str | None) -> None:
        self.loaded.update(weights)
        if version is not None:
            self.version = version

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if messages := self.refused.get(call):
            raise UpdateRefused(messages.pop(0))
