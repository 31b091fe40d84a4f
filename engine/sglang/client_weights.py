"""The weight-update calls of an SGLang server. Each raises UpdateRefused if the server refuses it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from engine.sglang.http_api import ChecksumsResponse, RankChecksums, UpdateRefused, UpdateResponse
from engine.sglang.http_session import HttpSession, extract_error_message, make_status_error


class WeightUpdateClient:
    def __init__(self, session: HttpSession) -> None:
        self._session = session

    async def begin_update(self) -> None:
        await self._post("/begin_weight_update", selector="all")

    async def end_update(self) -> None:
        await self._post("/end_weight_update")

    async def set_weight_version(self, version: str) -> None:
        """Relabels the current weights."""
        await self._post("/update_weight_version", new_version=version, abort_all_requests=False)

    async def update_from_disk(self, folder: Path, version: str) -> None:
        await self._post("/update_weights_from_disk", model_path=str(folder), weight_version=version, flush_cache=False)

    async def update_from_tensor(self, payloads: Sequence[bytes], version: str | None) -> None:
        """`payloads`: a pickle of [(name, tensor), ...] for each tensor-parallel rank."""
        encoded = [base64.b64encode(payload).decode() for payload in payloads]
        await self._post(
            "/update_weights_from_tensor", serialized_named_tensors=encoded, weight_version=version, flush_cache=False
        )

    async def init_group(self, host: str, port: int, world_size: int, name: str, backend: str) -> None:
        """The server's ranks start at 1."""
        await self._post(
            "/init_weights_update_group",
            master_address=host,
            master_port=port,
            rank_offset=1,
            world_size=world_size,
            group_name=name,
            backend=backend,
        )

    async def update_from_group(self, tensors: Mapping[str, Tensor], group: str, version: str | None) -> None:
        """Makes the server receive one broadcast for each of `tensors`."""
        await self._post(
            "/update_weights_from_distributed",
            names=list(tensors),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
            group_name=group,
            weight_version=version,
            flush_cache=False,
        )

    async def destroy_group(self, name: str) -> None:
        await self._post("/destroy_weights_update_group", group_name=name)

    async def compute_checksums(self) -> Sequence[RankChecksums]:
        """Checksums of the weights that each rank holds."""
        content = await self._session.post("/weights_checker", {"action": "checksum"})
        return self._session.parse(content, ChecksumsResponse).ranks

    async def _post(self, path: str, **body: object) -> None:
        status, content = await self._session.send("POST", path, body)
        if status not in (200, 400):
            raise make_status_error(path, status, content)
        response = self._session.parse(content, UpdateResponse)
        if not response.success:
            raise UpdateRefused(f"{path}: {response.message or extract_error_message(content)}")
