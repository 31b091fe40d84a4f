"""The HTTP client of an SGLang server: structs in and out.

Only safe requests are retried: reads (GET), and a generation that the server has not started
because the connection was refused or the queue was full. All other failures raise an exception of
http_api immediately.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from torch import Tensor

from asterism.engine.http.errors import (
    InvalidResponse,
    ServerStatusError,
    ServerTimeout,
    ServerUnreachable,
    is_safe_to_repeat,
    parse_error,
)
from asterism.engine.http.http_session import CONNECT_TIMEOUT_S, HttpSession, extract_error_message, make_status_error
from asterism.engine.sglang.http_api import (
    AdaptersResponse,
    Answer,
    ChecksumsResponse,
    FinishedByAbort,
    GenerateRequest,
    GenerateResponse,
    LoadsResponse,
    ModelInfo,
    RankChecksums,
    RankLoad,
    ServerInfo,
    UpdateRefused,
    UpdateResponse,
    check_version,
    parse_response,
)

RETRY_DELAYS_S = (0.05, 0.2, 0.8, 2.0)
_QUEUE_FULL_STATUSES = (429, 503)
UpdateT = TypeVar("UpdateT", UpdateResponse, AdaptersResponse)


class SGLangClient:
    """A client that sends at most `max_in_flight` generations concurrently; further calls wait.

    A request without a response within `request_timeout_s` raises ServerTimeout. For a stream, the
    timeout applies to each piece.
    """

    def __init__(
        self,
        base_url: str,
        *,
        max_in_flight: int = 1024,
        request_timeout_s: float = 600.0,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
    ) -> None:
        self._session = HttpSession(base_url, request_timeout_s, retry_delays_s)
        self.base_url = self._session.base_url
        self._retry_delays_s = retry_delays_s
        self._server_version = ""  # version for error messages; empty until the server has reported it
        self._generation_slots = asyncio.Semaphore(max_in_flight)

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    # ---------------------------------------------------------------- state

    async def is_ready(self) -> bool:
        """Return whether the server has started and accepts requests; a paused server is not ready."""
        return await self._probe_ready(CONNECT_TIMEOUT_S) == 200

    async def is_responsive(self, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
        """Return whether the server responds at all. A paused server responds."""
        return await self._probe_ready(timeout_s) is not None

    async def _probe_ready(self, timeout_s: float) -> int | None:
        try:
            status, _ = await self._session.send("GET", "/ready", timeout_s=timeout_s)
        except (ServerUnreachable, ServerTimeout):
            return None
        return status

    async def get_server_info(self) -> ServerInfo:
        """Return the server's info. Raises InvalidResponse if its version is not in http_api.SUPPORTED_VERSIONS."""
        content = await self._session.get("/server_info")
        self._server_version = self._parse(content, _ServerVersion).version
        check_version(self._server_version)
        return self._parse(content, ServerInfo)

    async def get_model_info(self) -> ModelInfo:
        return self._parse(await self._session.get("/model_info"), ModelInfo)

    async def get_loads(self) -> Sequence[RankLoad]:
        content = await self._session.get("/v1/loads?include=core,queues&format=json")
        return self._parse(content, LoadsResponse).loads

    # ---------------------------------------------------------------- generation

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Return the complete response to a request with `stream=False`."""
        async with aclosing(self.generate_streamed(request)) as responses:
            return await anext(responses)

    async def generate_streamed(self, request: GenerateRequest) -> AsyncGenerator[GenerateResponse, None]:
        """Yield responses as they arrive; the last one has a finish_reason, and `meta_info.id` is the
        argument of `abort`.

        Closing the generator early also aborts the request. Each attempt has its own rid, because
        the server aborts every request with the rid of a stream two seconds after this stream
        ended.
        """
        for attempt, wait_s in enumerate((*self._retry_delays_s, None)):
            rid = f"{request.rid}{attempt};" if attempt else request.rid
            body = msgspec.json.encode(msgspec.structs.replace(request, rid=rid))
            started = False
            try:
                async with self._generation_slots, aclosing(self._read_responses(body)) as responses:
                    async for response in responses:
                        started = True
                        yield response
                return
            except (ServerUnreachable, ServerStatusError) as failure:
                if started or wait_s is None or not is_safe_to_repeat(failure, _QUEUE_FULL_STATUSES):
                    raise
                await asyncio.sleep(wait_s)

    async def _read_responses(self, body: bytes) -> AsyncGenerator[GenerateResponse, None]:
        """Yield responses. Raises ServerUnreachable if the stream ends without a finish_reason."""
        finished = False
        async with self._session.stream("/generate", body) as stream, aclosing(stream.iter_json()) as contents:
            async for content in contents:
                response = self._parse_generation(content)
                if response.meta_info.finish_reason is not None:
                    finished = True
                    stream.expect_end()
                yield response
            if not finished:
                raise ServerUnreachable(stream.describe_end(), request_sent=True)

    def _parse_generation(self, content: bytes) -> GenerateResponse:
        try:
            response = self._parse(content, GenerateResponse)
        except InvalidResponse:
            if (error := parse_error(content)) is None:
                raise
            raise ServerStatusError("/generate", error[0] or 400, error[1]) from None
        match response.meta_info.finish_reason:
            case FinishedByAbort(message=message, status_code=int(status)) if not response.output_ids:
                raise ServerStatusError("/generate", status, message)
            case _:
                return response

    async def abort(self, rid_prefix: str) -> None:
        """Abort requests by their rid prefix. A request that has not reached the scheduler runs on."""
        await self._session.post("/abort_request", {"rid": rid_prefix})

    async def abort_all(self) -> None:
        """Abort the requests of all clients. A request that has not reached the scheduler keeps running."""
        await self._session.post("/abort_request", {"abort_all": True})

    # ---------------------------------------------------------------- control

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        await self._session.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._session.post("/continue_generation", {})

    async def flush_cache(self, timeout_s: float = 0.0) -> bool:
        """Return False, without a flush, if requests are still running or paused after the timeout."""
        path = f"/flush_cache?timeout={timeout_s:g}" if timeout_s else "/flush_cache"
        status, _ = await self._session.send("POST", path, {})
        return status == 200

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Free GPU memory of an idle server; a busy server crashes."""
        await self._session.post("/release_memory_occupation", {"tags": tags})

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Allocate released memory again; if it has not been released, the server crashes."""
        await self._session.post("/resume_memory_occupation", {"tags": tags})

    # ---------------------------------------------------------------- weights
    # Each call raises UpdateRefused if the server refuses it. No update flushes the cache.

    async def begin_update(self) -> None:
        await self._update("/begin_weight_update", selector="all")

    async def end_update(self) -> None:
        await self._update("/end_weight_update")

    async def set_weight_version(self, version: str) -> None:
        """Change the label of the current weights."""
        await self._update("/update_weight_version", new_version=version, abort_all_requests=False)

    async def update_from_disk(self, folder: Path, version: str) -> None:
        await self._update(
            "/update_weights_from_disk", model_path=str(folder), weight_version=version, flush_cache=False
        )

    async def update_from_tensor(self, payloads: Sequence[bytes], version: str | None) -> None:
        """Send weights. `payloads`: a pickle of [(name, tensor), ...] for each tensor-parallel rank."""
        encoded = [base64.b64encode(payload).decode() for payload in payloads]
        await self._update(
            "/update_weights_from_tensor", serialized_named_tensors=encoded, weight_version=version, flush_cache=False
        )

    async def init_group(self, host: str, port: int, world_size: int, name: str, backend: str) -> None:
        """Make the server join a process group, in which the server's ranks start at 1."""
        await self._update(
            "/init_weights_update_group",
            master_address=host,
            master_port=port,
            rank_offset=1,
            world_size=world_size,
            group_name=name,
            backend=backend,
        )

    async def update_from_group(self, tensors: Mapping[str, Tensor], group: str, version: str | None) -> None:
        """Make the server receive one broadcast for each of `tensors`."""
        await self._update(
            "/update_weights_from_distributed",
            names=list(tensors),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
            group_name=group,
            weight_version=version,
            flush_cache=False,
        )

    async def destroy_group(self, name: str) -> None:
        await self._update("/destroy_weights_update_group", group_name=name)

    async def compute_checksums(self) -> Sequence[RankChecksums]:
        """Return the checksums of the weights on each rank."""
        content = await self._session.post("/weights_checker", {"action": "checksum"})
        return self._parse(content, ChecksumsResponse).ranks

    # ---------------------------------------------------------------- adapters

    async def load_adapter(
        self, name: str, config: Mapping[str, object], payloads: Sequence[str], checksums: Mapping[str, str]
    ) -> Sequence[str]:
        """Load an adapter; return the names of all loaded adapters. Running requests keep their adapters.

        `payloads`: a pickle of {name: tensor} in base64 for each tensor-parallel rank. `checksums`: SHA-256 of each
        tensor; the server crashes if a tensor has another checksum.
        """
        body = {"config_dict": config, "serialized_named_tensors": payloads, "expected_checksums": checksums}
        return await self._change_adapters("/load_lora_adapter_from_tensors", name, body)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter after the server has finished the requests that name it."""
        await self._change_adapters("/unload_lora_adapter", name, {})

    async def _change_adapters(self, path: str, name: str, body: Mapping[str, object]) -> Sequence[str]:
        response = await self._post_update(path, {"lora_name": name, **body}, AdaptersResponse)
        return list(response.loaded_adapters or ())

    async def _update(self, path: str, **body: object) -> None:
        await self._post_update(path, body, UpdateResponse)

    async def _post_update(self, path: str, body: Mapping[str, object], kind: type[UpdateT]) -> UpdateT:
        """Send an update of weights or adapters. Raises UpdateRefused if the server refuses it."""
        status, content = await self._session.send("POST", path, body)
        if status not in (200, 400):
            raise make_status_error(path, status, content)
        response = self._parse(content, kind)
        if not response.success:
            raise UpdateRefused(f"{path}: {response.message or extract_error_message(content)}")
        return response

    def _parse(self, content: bytes, kind: type[Answer]) -> Answer:
        return parse_response(content, kind, self._server_version)


class _ServerVersion(msgspec.Struct):
    version: str
