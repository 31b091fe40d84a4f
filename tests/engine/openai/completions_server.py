"""A server on loopback with OpenAI's completions API in several dialects. A real engine generates the tokens."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from asterism.configs.schema.algorithm import Sampling
from asterism.engine.contract import Capacity, Generation, GenerationRequest
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.engine.inference.embedded import EmbeddedEngine
from tests.engine.http.served_app import serving_app

Dialect = Literal["vllm", "llama.cpp", "openai"]
MODEL = "small"
PLAIN_FIELDS = {"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stream", "stop", "logprobs"}


class CompletionsServer:
    """The dialect `vllm` returns token ids, `llama.cpp` returns ids only in logprobs, and `openai` uses only texts.

    `openai` also sends events without a space after the colon. The next requests get the HTTP statuses in `failures`, with
    the header `retry_after`. With `is_down`, the proxy answers 502. Requests after the first `max_answered` get no answer.
    """

    def __init__(self, model: Path, dialect: Dialect, sequence_tokens: int, key: str = "") -> None:
        self.dialect: Dialect = dialect
        self.engine = EmbeddedEngine(model, Capacity(16 * sequence_tokens, 16, sequence_tokens), max_running=16)
        self.tokenizer = load_tokenizer(model)
        self.bodies: list[dict[str, Any]] = []
        self.failures: list[int] = []
        self.retry_after, self.is_down = "0", False
        self.num_cancelled, self.max_answered = 0, 1_000_000
        self.request_stalled = asyncio.Event()
        self.request_cancelled = asyncio.Event()
        self.model = MODEL
        self._sequence_tokens, self._key, self._numbers = sequence_tokens, key, count(1)

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Yield the server's URL."""
        app = web.Application()
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_post("/v1/completions", self._complete)
        await self.engine.start()
        try:
            async with serving_app(app, port, shutdown_timeout_s=0.1) as url:
                yield f"{url}/v1"
        finally:
            await self.engine.close()

    async def _list_models(self, request: web.Request) -> web.Response:
        if (denial := self._deny(request)) is not None:
            return denial
        limit = {"max_model_len": self._sequence_tokens} if self.dialect == "vllm" else {}
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model", **limit}]})

    def _deny(self, request: web.Request) -> web.Response | None:
        if self.is_down:
            return web.Response(status=502, text="Bad Gateway")
        if self._key and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": {"message": "Incorrect API key", "code": None}}, status=401)
        return None

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        self.bodies.append(body)
        if (denial := self._deny(request)) is not None:
            return denial
        if self.failures:
            error = {"message": "overloaded", "code": "rate_limit_exceeded"}
            headers = {"Retry-After": self.retry_after}
            return web.json_response({"error": error}, status=self.failures.pop(0), headers=headers)
        unknown = set(body) - PLAIN_FIELDS
        if self.dialect == "openai" and (unknown or not isinstance(body["prompt"], str)):
            message = f"Unrecognized request arguments: {sorted(unknown)}"
            return web.json_response({"error": {"message": message}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(response, body)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.request_cancelled.set()
            raise
        await response.write(b"data: [DONE]\r\n\r\n")
        return response

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        if len(self.bodies) > self.max_answered:
            self.request_stalled.set()
            await asyncio.Event().wait()
        asked = self._read_request(body)
        pieces = asyncio.Queue[NDArray[np.int32] | None]()
        call = asyncio.ensure_future(self.engine.generate(asked, pieces.put_nowait))
        call.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            await response.write(b": comment\n\n")
            while (piece := await pieces.get()) is not None:
                await self._write(response, self._describe(piece.tolist(), asked.stop_token_ids))
            found = await call
            await self._write(response, {"text": "", **self._describe_end(found)})
        finally:
            call.cancel()

    def _read_request(self, body: dict[str, Any]) -> GenerationRequest:
        prompt, texts = body["prompt"], body.get("stop", [])
        ids = self.tokenizer.encode(prompt, trusted=True) if isinstance(prompt, str) else prompt
        stops = (
            body["stop_token_ids"] if self.dialect == "vllm" else [self.tokenizer.get_token_id(text) for text in texts]
        )
        return GenerationRequest(
            next(self._numbers),
            np.array(ids, np.int32),
            body["max_tokens"],
            sampling=Sampling(temperature=body["temperature"], top_p=body["top_p"], top_k=max(0, body.get("top_k", 0))),
            stop_token_ids=tuple(stops),
            seed=body["seed"],
        )

    def _describe(self, ids: list[int], stops: tuple[int, ...]) -> dict[str, Any]:
        choice: dict[str, Any] = {"text": self.tokenizer.decode([token for token in ids if token not in stops])}
        if self.dialect == "vllm":
            texts = [f"token_id:{token}" for token in ids]
            choice |= {"token_ids": ids, "logprobs": {"tokens": texts, "token_logprobs": [-1.5] * len(ids)}}
        if self.dialect == "llama.cpp":
            entries = [{"id": token, "token": "", "bytes": [], "logprob": -2.5, "top_logprobs": []} for token in ids]
            choice |= {"logprobs": {"content": entries}}
        return choice

    def _describe_end(self, found: Generation) -> dict[str, Any]:
        stop = {"stop_reason": int(found.token_ids[-1])} if self.dialect == "vllm" and found.finish == "stop" else {}
        return {"finish_reason": found.finish, **stop}

    async def _write(self, response: web.StreamResponse, choice: dict[str, Any]) -> None:
        chunk = {"id": "1", "object": "text_completion", "choices": [{"index": 0, **choice}]}
        name = b"data:" if self.dialect == "openai" else b"data: "
        await response.write(name + msgspec.json.encode(chunk) + b"\r\n\r\n")
