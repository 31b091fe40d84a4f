"""Sends published adapters to a server: their base once, as whole weights, and then only A and B of each version.

A version is a LoRA adapter with a name of its own on the server, and each request names an adapter. The server
computes W x + (alpha / r) B A x with W, A and B in its dtype. Requests that run during an update keep the adapter that
they name, so the engine ends and repeats them (sglang_engine.py); then the transport unloads the earlier adapters.

SGLang 0.5.23 stacks the adapters of queries, keys and values, and those of gate and up (lora/lora.py), and needs all
adapters of a stack: a server with adapters of k_proj alone exits. The transport sends zeros for missing adapters.
"""

import asyncio
import base64
import hashlib
import pickle
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import WeightsRefused
from asterism.engine.http.errors import ServerStatusError
from asterism.engine.model.lora_options import LoraOptions
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import UpdateRefused
from asterism.engine.sglang.weights import WeightTransport
from asterism.engine.sglang.weights.server_parameters import FUSED
from asterism.engine.weight_transfer.adapter_slots import BASE_RECORD_BYTES, AdapterBase, get_adapter_layout, parse_base
from asterism.engine.weight_transfer.shared_memory import open_body

_NAME_PREFIX = "asterism-"  # prefix of the names of adapters that this project loads
_PEFT_PREFIX = "base_model.model."


def complete_stacks(targets: Sequence[str]) -> tuple[str, ...]:
    """Return the targets, and the other projections of their stacks."""
    stacked = [target for stack in FUSED.values() if set(stack) & set(targets) for target in stack]
    return tuple(dict.fromkeys((*targets, *stacked)))


class _Payload(NamedTuple):
    base: AdapterBase
    tensors: str  # a pickle of {name: matrix} in base64
    checksums: Mapping[str, str]  # checksums by the matrix's name


class AdapterTransport:
    def __init__(
        self,
        whole: WeightTransport,
        parameters: Mapping[str, Tensor],
        options: LoraOptions,
        dtype: torch.dtype,
    ) -> None:
        """`whole`: sends the base. `parameters`: of the model, for the shapes. `dtype`: dtype of the server."""
        self._whole, self._options, self._dtype = whole, options, dtype
        self._targets = complete_stacks(options.targets)
        self._layout = get_adapter_layout(parameters, options)
        self._stacked_layout = get_adapter_layout(parameters, options._replace(targets=self._targets))
        self._held_base = ""  # digest of the server's base

    def forget_base(self) -> None:
        """Send the base again with the next update, because the server has lost its weights."""
        self._held_base = ""

    async def update(
        self, client: SGLangClient, weights: WeightsPublished, end_requests: Callable[[], Awaitable[None]]
    ) -> str:
        """Return the name of the adapter for later requests. The caller sends no request meanwhile.

        `end_requests`: ends all requests of the server. Raises WeightsRefused if requests can continue with the earlier
        adapter, and another EngineFailure as WeightTransport.update does.
        """
        payload = await asyncio.to_thread(self._read, weights)
        if payload.base.digest != self._held_base:
            await end_requests()
            self.forget_base()
            await self._whole.update(client, payload.base.locate(weights))
            self._held_base = payload.base.digest
        name = f"{_NAME_PREFIX}{weights.version}-{secrets.token_hex(4)}"
        loaded = await self._load(client, name, weights, payload)
        await client.resume()  # a paused server ends no request
        await end_requests()
        for other in loaded:
            if other.startswith(_NAME_PREFIX) and other != name:  # an earlier incarnation can have left adapters
                await client.unload_adapter(other)
        await client.flush_cache()
        return name

    async def close(self) -> None:
        await self._whole.close()

    async def _load(
        self, client: SGLangClient, name: str, weights: WeightsPublished, payload: _Payload
    ) -> Sequence[str]:
        """Return the names of all adapters of the server."""
        config = {
            "peft_type": "LORA",
            "r": self._options.rank,
            "lora_alpha": payload.base.scale * self._options.rank,
            "target_modules": self._targets,
        }
        tp_size = (await client.get_server_info()).tp_size
        try:
            return await client.load_adapter(name, config, [payload.tensors] * tp_size, payload.checksums)
        except (UpdateRefused, ServerStatusError) as refusal:
            raise WeightsRefused(
                f"the server refused the adapters of version {weights.version}: {refusal}"
            ) from refusal

    def _read(self, weights: WeightsPublished) -> _Payload:
        with open_body(weights, self._layout) as body:
            base = parse_base(body[:BASE_RECORD_BYTES].numpy().tobytes())
            matrices = self._layout.view(body)
            zeros = self._stacked_layout.view(torch.zeros(self._stacked_layout.num_bytes, dtype=torch.uint8))
            tensors = {
                f"{_PEFT_PREFIX}{name}": matrices.get(name, zero).to(self._dtype, copy=True)
                for name, zero in zeros.items()
            }
        content = base64.b64encode(pickle.dumps(tensors, protocol=4)).decode()
        return _Payload(base, content, {name: _hash(tensor) for name, tensor in tensors.items()})


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().data).hexdigest()
