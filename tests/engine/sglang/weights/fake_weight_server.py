"""A fake server that loads weights over HTTP and with a gloo process group."""

import asyncio
import base64
import hashlib
import pickle
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from tests.engine.sglang.fake_server import FakeServer, Handler

UPDATES = {
    "disk": "/update_weights_from_disk",
    "tensor": "/update_weights_from_tensor",
    "group": "/update_weights_from_distributed",
    "ipc": "/update_weights_from_tensor",
}
Body = dict[str, Any]


class UpdateError(Exception):
    pass


class FakeWeightServer(FakeServer):
    """A server that loads weights. `refusals`: by path, the message that refuses the next request."""

    def __init__(self, *, tp_size: int = 1) -> None:
        super().__init__()
        # The server is quantized, so its checksums are not compared with those of the published parameters.
        self.info |= {"tp_size": tp_size, "quantization": "fp8"}
        self.refusals: dict[str, str] = {}
        self.loaded: dict[str, Tensor] = {}
        self.groups: dict[str, ProcessGroupGloo] = {}
        self._open = False
        updates = {
            "/begin_weight_update": self._begin_update,
            "/end_weight_update": self._end_update,
            UPDATES["disk"]: self._update_from_disk,
            UPDATES["tensor"]: self._update_from_tensor,
            UPDATES["group"]: self._update_from_group,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
        }
        self.handlers |= {path: self._handle_update(path, update) for path, update in updates.items()}
        self.handlers["/weights_checker"] = self.compute_checksum

    @property
    def paths(self) -> list[str]:
        """Return the paths of all requests that are not reads."""
        return [path for path, _ in self.requests if path not in ("/server_info", "/model_info", "/weights_checker")]

    async def compute_checksum(self, request: web.Request, body: Body) -> web.StreamResponse:
        content = b"".join(self.loaded[name].view(torch.uint8).numpy().tobytes() for name in sorted(self.loaded))
        rank = {
            "checksums": {},
            "per_gpu_checksum": hashlib.sha256(content).hexdigest(),
            "parallelism_info": [{"tp_rank": 0, "pp_rank": 0}],
        }
        return web.json_response({"ranks": [rank]})

    async def receive(self, shapes: Sequence[tuple[list[int], torch.dtype]], group: str) -> list[Tensor]:
        """Receive one broadcast for each shape."""
        if group not in self.groups:
            raise UpdateError(f"Failed to receive weights: Group {group} not in {list(self.groups)}")
        weights = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        try:
            await asyncio.to_thread(_join_broadcasts, weights, self.groups[group])
        except RuntimeError as error:
            raise UpdateError(f"Failed to receive weights: {error}") from None
        return weights

    def _handle_update(self, path: str, update: Callable[[Body], Awaitable[None]]) -> Handler:
        async def handle(request: web.Request, body: Body) -> web.StreamResponse:
            try:
                if path in self.refusals:
                    raise UpdateError(self.refusals.pop(path))
                await update(body)
            except UpdateError as error:
                return web.json_response({"success": False, "message": str(error)}, status=400)
            return web.json_response({"success": True, "message": ""})

        return handle

    async def _begin_update(self, body: Body) -> None:
        if self._open:
            raise UpdateError("a weight-update session is already open; call end_weight_update() first")
        self._open = True

    async def _end_update(self, body: Body) -> None:
        self._open = False

    async def _update_from_disk(self, body: Body) -> None:
        self._store(_load_files(Path(body["model_path"])), body)

    async def _update_from_tensor(self, body: Body) -> None:
        assert self._open
        payloads = body["serialized_named_tensors"]
        assert len(payloads) == self.info["tp_size"]
        self._store(dict(pickle.loads(base64.b64decode(payloads[-1]))), body)

    async def _update_from_group(self, body: Body) -> None:
        assert self._open
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        weights = await self.receive([*zip(body["shapes"], dtypes, strict=True)], body["group_name"])
        self._store(dict(zip(body["names"], weights, strict=True)), body)

    def _store(self, weights: dict[str, Tensor], body: Body) -> None:
        assert not body["flush_cache"]
        self.loaded |= weights
        self.weight_version = body["weight_version"] or self.weight_version

    async def _init_group(self, body: Body) -> None:
        assert (body["rank_offset"], body["backend"]) == (1, "gloo")
        name, size, timeout = body["group_name"], body["world_size"], timedelta(seconds=20)

        def join() -> None:
            store = PrefixStore(name, TCPStore(body["master_address"], body["master_port"], size, timeout=timeout))
            self.groups[name] = ProcessGroupGloo(PrefixStore("cpu/", PrefixStore(f"{name}/", store)), 1, size, timeout)

        await asyncio.to_thread(join)

    async def _destroy_group(self, body: Body) -> None:
        if self.groups.pop(body["group_name"], None) is None:
            raise UpdateError("The group to be destroyed does not exist.")


def _join_broadcasts(weights: Sequence[Tensor], group: Any) -> None:
    for work in [group.broadcast(weight, 0) for weight in weights]:
        work.wait()


def _load_files(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
