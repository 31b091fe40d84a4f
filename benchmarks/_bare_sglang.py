"""A bare HTTP client of an SGLang server: posts bodies that are ready, and takes of an answer what a caller wants."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.sglang.protocol import GenerateRequest, SamplingParams

_HEADERS = {"Content-Type": "application/json"}
_KEPT_S = 2.0  # less than the 5 s after which the server closes a connection that is not used


class _New(msgspec.Struct):
    completion_tokens: int
    output_token_logprobs: list[tuple[float, int, str | None]]


class _Answer(msgspec.Struct):
    meta_info: _New


class _Read(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, str | None]]


class _Scored(msgspec.Struct):
    meta_info: _Read


class BareClient:
    """Nothing is tried again, checked or counted. Raises aiohttp.ClientError."""

    def __init__(self, url: str) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(url, connector=connector, timeout=timeout, raise_for_status=True)
        self._numbers = count()

    async def close(self) -> None:
        await self._session.close()

    async def whole(self, body: bytes) -> int:
        """New tokens, of an answer that comes in one piece."""
        return msgspec.json.decode(await self._post(body), type=_Answer).meta_info.completion_tokens

    async def streamed(self, body: bytes) -> int:
        """New tokens, of an answer that comes in pieces."""
        pieces: list[_Answer] = []
        rest = b""
        async with self._session.post("/generate", data=body, headers=_HEADERS) as response:
            async for piece in response.content.iter_any():
                *events, rest = (rest + piece).split(b"\n\n")
                for event in events:
                    if event != b"data: [DONE]":
                        pieces.append(msgspec.json.decode(event.removeprefix(b"data: "), type=_Answer))
        return pieces[-1].meta_info.completion_tokens

    async def logprobs_after(self, prompt: Sequence[int], answer: Sequence[int]) -> NDArray[np.float64]:
        """Of the answer's tokens, as the server finds them when it reads prompt and answer."""
        request = GenerateRequest(
            rid=f"score-{id(self)}-{next(self._numbers)};",
            input_ids=[*prompt, *answer],
            sampling_params=SamplingParams(max_new_tokens=1),
            return_logprob=True,
            logprob_start_len=len(prompt) - 1,
        )
        scored = msgspec.json.decode(await self._post(msgspec.json.encode(request)), type=_Scored)
        read = scored.meta_info.input_token_logprobs[-len(answer) :]
        return np.array([logprob for logprob, _, _ in read], np.float64)

    async def _post(self, body: bytes) -> bytes:
        async with self._session.post("/generate", data=body, headers=_HEADERS) as response:
            return await response.read()
