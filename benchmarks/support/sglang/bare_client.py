"""A bare HTTP client of an SGLang server: posts prebuilt bodies, decodes few fields."""

from collections.abc import Sequence
from itertools import count

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from asterism.engine.sglang.http_api import GenerateRequest, SamplingParams

_HEADERS = {"Content-Type": "application/json"}
_KEEPALIVE_S = 2.0  # seconds to keep an idle connection; the server closes it after 5 s


class _GeneratedInfo(msgspec.Struct):
    completion_tokens: int
    output_token_logprobs: list[tuple[float, int, str | None]]


class _GenerateAnswer(msgspec.Struct):
    meta_info: _GeneratedInfo


class _ScoredInfo(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, str | None]]


class _ScoreAnswer(msgspec.Struct):
    meta_info: _ScoredInfo


class BareClient:
    """A client without retries, checks or counts. Raises aiohttp.ClientError."""

    def __init__(self, url: str) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(url, connector=connector, timeout=timeout, raise_for_status=True)
        self._numbers = count()

    async def close(self) -> None:
        await self._session.close()

    async def generate(self, body: bytes) -> int:
        """Request an answer in one piece. Return its number of new tokens."""
        return msgspec.json.decode(await self._post(body), type=_GenerateAnswer).meta_info.completion_tokens

    async def generate_streamed(self, body: bytes) -> int:
        """Request a streamed answer. Return its number of new tokens."""
        pieces: list[_GenerateAnswer] = []
        rest = b""
        async with self._session.post("/generate", data=body, headers=_HEADERS) as response:
            async for piece in response.content.iter_any():
                *events, rest = (rest + piece).split(b"\n\n")
                for event in events:
                    if event != b"data: [DONE]":
                        pieces.append(msgspec.json.decode(event.removeprefix(b"data: "), type=_GenerateAnswer))
        return pieces[-1].meta_info.completion_tokens

    async def compute_logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> NDArray[np.float64]:
        """Return the server's prefill logprobs of the answer's tokens."""
        request = GenerateRequest(
            rid=f"score-{id(self)}-{next(self._numbers)};",
            input_ids=[*prompt, *answer],
            sampling_params=SamplingParams(max_new_tokens=1),
            return_logprob=True,
            logprob_start_len=len(prompt) - 1,
        )
        scored = msgspec.json.decode(await self._post(msgspec.json.encode(request)), type=_ScoreAnswer)
        read = scored.meta_info.input_token_logprobs[-len(answer) :]
        return np.array([logprob for logprob, _, _ in read], np.float64)

    async def _post(self, body: bytes) -> bytes:
        async with self._session.post("/generate", data=body, headers=_HEADERS) as response:
            return await response.read()
