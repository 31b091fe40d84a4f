"""The weight-update calls of an SGLang server. Every call raises UpdateRefused if the server
refuses it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.sglang.errors import UpdateRefused
from engine.sglang.http_api import ChecksumsResponse, RankChecksums, UpdateResponse
from engine.sglang.http_session import HttpSession, extract_error_message, make_status_error


class WeightUpdateClient:
    def __init__(self, session: HttpSession) -> None:
        self._session = session

    async def begin_update(self) -> None:
        await self._post("/begin_weight_update", {"selector": "all"})

    async def end_update(self) -> None:
        await self._post("/end_weight_update", {})

    async def set_weight_version(self, version: str) -> None:
        """Relabels the current weights."""
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def update_from_disk(self, folder: Path, version: str, *, flush_cache: bool) -> None:
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": flush_cache}
        await self._post("/update_weights_from_disk", body)

    async def update_from_tensor(
        self, payloads: Sequence[bytes], version: str | None, *, load_format: str | None, flush_cache: bool
    ) -> None:
        """`payloads`: a pickle of [(name, tensor), ...] for each tensor-parallel rank."""
        body = {
            "serialized_named_tensors": [base64.b64encode(payload).decode() for payload in payloads],
            "weight_version": version,
            "load_format": load_format,
            "flush_cache": flush_cache,
        }
        await self._post("/update_weights_from_tensor", body)

    async def init_group(
        self, host: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", body)

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
        body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group,
            "weight_version": version,
            "flush_cache": flush_cache,
        }
        await self._post("/update_weights_from_distributed", body)

    async def destroy_group(self, name: str) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": name})

    async def compute_checksums(self) -> Sequence[RankChecksums]:
        """Checksums of the weights that each rank holds."""
        content = await self._session.post("/weights_checker", {"action": "checksum"})
        return self._session.parse(content, ChecksumsResponse).ranks

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        status, content = await self._session.send("POST", path, body)
        if status not in (200, 400):
            raise make_status_error(path, status, content)
        response = self._session.parse(content, UpdateResponse)
        if not response.success:
            raise UpdateRefused(f"{path}: {response.message or extract_error_message(content)}")
