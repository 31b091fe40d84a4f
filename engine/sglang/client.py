"""The HTTP side of an SGLang server: one pool of kept connections, structs in and out.

Tried again is only what is safe: what is merely asked (GET), and a generation that no server has begun, because the
connection was refused or the queue was full. All else fails at once, with what engine.sglang.errors says.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from engine.sglang.errors import ServerRefused, ServerSlow, ServerUnreachable, UnknownAnswer, UpdateRefused
from engine.sglang.protocol import (
    Aborted,
    Checksums,
    Done,
    GenerateAnswer,
    GenerateRequest,
    Loads,
    ModelInfo,
    RankChecksums,
    RankLoad,
    ServerInfo,
    check_version,
    decode,
    error_in,
)

Answer = TypeVar("Answer")
CONNECT_S = 10.0
KEPT_S = 2.0  # less than the 5 s after which the server closes a connection that is not used
BACK_OFF_S = (0.05, 0.2, 0.8, 2.0)
_FULL = (429, 503)
_END = b"[DONE]"
_JSON = {"Content-Type": "application/json"}


class SGLangClient:
    """At most `connections` generations are under way; a further one waits. What has to do with an answer that does not
    come within `request_s` fails as ServerSlow: in a stream, the next piece of it."""

    def __init__(
        self,
        base_url: str,
        *,
        connections: int = 1024,
        request_s: float = 600.0,
        back_off_s: Sequence[float] = BACK_OFF_S,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._request_s, self._back_off_s = request_s, back_off_s
        self._generations = asyncio.Semaphore(connections)
        self._version = ""
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # ---------------------------------------------------------------- what it is and does

    async def ready(self) -> bool:
        """Whether it has started, and takes requests: one that is paused is not ready."""
        return await self._asked_ready(CONNECT_S) == 200

    async def answers(self, within_s: float = CONNECT_S) -> bool:
        """Whatever it says: one that is paused does too."""
        return await self._asked_ready(within_s) is not None

    async def _asked_ready(self, within_s: float) -> int | None:
        try:
            status, _ = await self._exchange("GET", "/ready", limit_s=within_s)
        except (ServerUnreachable, ServerSlow):
            return None
        return status

    async def server_info(self) -> ServerInfo:
        """Raises UnknownAnswer where the server's version is none of protocol.SUPPORTED."""
        content = await self._get("/server_info")
        self._version = decode(content, _Versioned).version
        check_version(self._version)
        return decode(content, ServerInfo)

    async def model_info(self) -> ModelInfo:
        return self._decoded(await self._get("/model_info"), ModelInfo)

    async def loads(self) -> Sequence[RankLoad]:
        return self._decoded(await self._get("/v1/loads?include=core,queues&format=json"), Loads).loads

    # ---------------------------------------------------------------- tokens

    async def generate(self, request: GenerateRequest) -> GenerateAnswer:
        """The whole answer at its end. A request with a stream is one for `generate_streamed`."""
        async with aclosing(self._generate(request)) as answers:
            return await anext(answers)

    def generate_streamed(self, request: GenerateRequest) -> AsyncGenerator[GenerateAnswer, None]:
        """Answers as they come, the last one with a finish_reason; `meta_info.id` is what `abort` takes. To close it early
        aborts the request too."""
        return self._generate(request)

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateAnswer, None]:
        """Each try has a rid of its own: two seconds after the end of a stream the server aborts what has its rid."""
        for number, wait_s in enumerate((*self._back_off_s, None)):
            rid = f"{request.rid}{number};" if number else request.rid
            body = msgspec.json.encode(msgspec.structs.replace(request, rid=rid))
            begun = False
            try:
                async with self._generations, aclosing(self._answers(body)) as answers:
                    async for answer in answers:
                        begun = True
                        yield answer
                return
            except (ServerUnreachable, ServerRefused) as failure:
                if begun or wait_s is None or not _never_began(failure):
                    raise
                await asyncio.sleep(wait_s)

    async def _answers(self, body: bytes) -> AsyncGenerator[GenerateAnswer, None]:
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_S, sock_read=self._request_s)
        with _failures("/generate", self._request_s):
            async with self._opened().post("/generate", data=body, headers=_JSON, timeout=timeout) as response:
                if response.status != 200:
                    raise _refusal("/generate", response.status, await response.read())
                if response.content_type == "application/json":
                    yield self._answer(await response.read())
                    return
                ended = False
                async for event in _events(response.content):  # to its very end: else the connection is not kept
                    if event == _END:
                        ended = True
                    else:
                        yield self._answer(event)
        if not ended:
            raise ServerUnreachable("the stream of /generate broke off", sent=True)

    def _answer(self, content: bytes) -> GenerateAnswer:
        try:
            answer = self._decoded(content, GenerateAnswer)
        except UnknownAnswer:
            if (error := error_in(content)) is None:
                raise
            raise ServerRefused("/generate", error[0] or 400, error[1]) from None
        match answer.meta_info.finish_reason:
            case Aborted(message=message, status_code=int(status)) if not answer.output_ids:
                raise ServerRefused("/generate", status, message)
            case _:
                return answer

    async def abort(self, rid: str) -> None:
        """Of every request whose rid begins so. One that has not reached the server's scheduler goes on all the same,
        and no later word stops it: close its stream instead."""
        await self._post("/abort_request", {"rid": rid})

    # ---------------------------------------------------------------- control

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def flush_cache(self, within_s: float = 0.0) -> bool:
        """False where requests are held, or have not ended within that time: nothing is flushed then."""
        status, _ = await self._exchange(
            "POST", f"/flush_cache?timeout={within_s:g}" if within_s else "/flush_cache", {}
        )
        return status == 200

    # ---------------------------------------------------------------- memory

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Of a server that is idle: another one dies of it."""
        await self._post("/release_memory_occupation", {"tags": tags})

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """What was not released kills the server."""
        await self._post("/resume_memory_occupation", {"tags": tags})

    # ---------------------------------------------------------------- weights: all raise UpdateRefused

    async def begin_update(self) -> None:
        await self._update("/begin_weight_update", {"selector": "all"})

    async def end_update(self) -> None:
        await self._update("/end_weight_update", {})

    async def name_weights(self, version: str) -> None:
        """Its weights stay as they are."""
        await self._update("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def update_from_disk(self, folder: Path, version: str, *, flush_cache: bool) -> None:
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": flush_cache}
        await self._update("/update_weights_from_disk", body)

    async def update_from_tensor(
        self, payloads: Sequence[bytes], version: str | None, *, load_format: str | None, flush_cache: bool
    ) -> None:
        """`payloads`: a pickle of [(name, tensor), ...] for each tensor-parallel rank."""
        encoded = [base64.b64encode(payload).decode() for payload in payloads]
        body = {
            "serialized_named_tensors": encoded,
            "weight_version": version,
            "load_format": load_format,
            "flush_cache": flush_cache,
        }
        await self._update("/update_weights_from_tensor", body)

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
        await self._update("/init_weights_update_group", body)

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
        await self._update("/update_weights_from_distributed", body)

    async def destroy_group(self, name: str) -> None:
        await self._update("/destroy_weights_update_group", {"group_name": name})

    async def checksums(self) -> Sequence[RankChecksums]:
        """Of what each rank holds."""
        content = await self._post("/weights_checker", {"action": "checksum"})
        return self._decoded(content, Checksums).ranks

    async def _update(self, path: str, body: Mapping[str, Any]) -> None:
        status, content = await self._exchange("POST", path, body)
        if status not in (200, 400):
            raise _refusal(path, status, content)
        done = self._decoded(content, Done)
        if not done.success:
            raise UpdateRefused(f"{path}: {done.message or _said(content)}")

    # ---------------------------------------------------------------- the wire

    async def _get(self, path: str) -> bytes:
        for wait_s in self._back_off_s:
            try:
                return await self._once("GET", path)
            except ServerUnreachable:
                await asyncio.sleep(wait_s)
        return await self._once("GET", path)

    async def _post(self, path: str, body: Mapping[str, Any]) -> bytes:
        return await self._once("POST", path, body)

    async def _once(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        status, content = await self._exchange(method, path, body)
        if status != 200:
            raise _refusal(path, status, content)
        return content

    async def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, limit_s: float | None = None
    ) -> tuple[int, bytes]:
        limit_s = limit_s or self._request_s
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        content = None if body is None else msgspec.json.encode(body)
        with _failures(path, limit_s):
            async with self._opened().request(method, path, data=content, headers=_JSON, timeout=timeout) as response:
                return response.status, await response.read()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
            self._session = aiohttp.ClientSession(self.base_url, connector=connector)
        return self._session

    def _decoded(self, content: bytes, kind: type[Answer]) -> Answer:
        return decode(content, kind, self._version)


class _Versioned(msgspec.Struct):
    version: str


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """What stands behind `data:`, of any length."""
    rest = bytearray()
    async for piece in content.iter_any():
        rest += piece
        if b"\n\n" not in piece and not rest.endswith(b"\n\n"):
            continue
        *events, rest = rest.split(b"\n\n")
        for event in events:
            yield bytes(event.removeprefix(b"data: "))


@contextmanager
def _failures(path: str, limit_s: float) -> Generator[None, None, None]:
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise ServerUnreachable(f"{path}: {error}", sent=False) from error
    except TimeoutError as error:
        raise ServerSlow(f"{path}: nothing came within {limit_s:g} s", limit_s) from error
    except aiohttp.ClientError as error:
        raise ServerUnreachable(f"{path}: the connection broke ({type(error).__name__})", sent=True) from error


def _never_began(failure: ServerUnreachable | ServerRefused) -> bool:
    return not failure.sent if isinstance(failure, ServerUnreachable) else failure.status in _FULL


def _refusal(path: str, status: int, content: bytes) -> ServerRefused:
    return ServerRefused(path, status, _said(content))


def _said(content: bytes) -> str:
    error = error_in(content)
    return error[1] if error else content[:500].decode(errors="replace")
