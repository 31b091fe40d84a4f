"""What every inference engine does, embedded or served."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from bus.messages import WeightsPublished


class EngineFailure(Exception):
    """The engine could not answer: infrastructure, nobody's answer. `str(error)` is the cause."""


class RequestRefused(EngineFailure):
    """The request can never be served: a token id outside the vocabulary, a sequence beyond the capacity."""


class WeightsRefused(EngineFailure):
    """The published weights cannot be read, or are not what was announced. The engine keeps those that it has."""


class Capacity(msgspec.Struct, frozen=True):
    """The KV cache, in tokens. Every sequence takes whole pages, which it may share with others."""

    kv_tokens: int
    page_tokens: int
    sequence_tokens: int  # of the longest sequence that the engine takes

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


class GenerationRequest(msgspec.Struct, frozen=True):
    sequence_id: int  # the trajectory's; its cached prefix is reused when its ids still match
    token_ids: NDArray[np.int32]  # [T], all so far
    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0  # with a token's position it decides the token's draw


class Generation(msgspec.Struct, frozen=True):
    """N new tokens; a stop token is among them."""

    token_ids: NDArray[np.int32]  # [N]
    logprobs: NDArray[
        np.float32
    ]  # [N], log p of the sampled token under softmax(logits / temperature), before top-p and top-k; greedy: temperature 1
    versions: NDArray[np.int32]  # [N], policy version that produced each
    finish: Literal["stop", "length", "abort"]
    cached_tokens: int = 0  # of the request's tokens, so many were found in the cache as it began


class EngineLoad(msgspec.Struct, frozen=True):
    """As in bus.messages.EngineLoadReported. What is counted is counted since the start."""

    running: int  # sequences that decode, and the one that reads its prompt
    waiting: int  # requests that have not begun for lack of room
    used_tokens: int  # KV tokens in pages that are not free
    cached_tokens: int  # of them in pages that no running sequence holds
    decode_steps: int
    generated_tokens: int
    prefilled_tokens: int  # tokens of requests that were computed, not found in the cache
    recomputed_tokens: int  # of them those that this sequence had had here before: evicted, preempted or forgotten
    evicted_tokens: int  # in cached pages that were given up for lack of room
    preempted: int  # running sequences that were stopped for lack of room
    busy_s: float  # time spent computing


class Engine(Protocol):
    async def start(self) -> Capacity: ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Raises RequestRefused before anything reaches the model, EngineFailure if the engine breaks."""
        ...

    def abort(self, sequence_id: int) -> None:
        """The pending generate returns what it has, with finish "abort". Nothing pending: no effect."""
        ...

    def forget(self, sequence_id: int) -> None:
        """Give the sequence's KV tokens back."""
        ...

    async def load_weights(self, weights: WeightsPublished) -> None:
        """Between two decode steps; tokens from then on bear the new version. Cached keys and values of parked
        sequences are dropped; running ones go on with what they have. Raises WeightsRefused."""
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def release(self) -> None:
        """Give the memory of weights and cache back, as far as the engine can. Requests wait then, until load_weights has
        brought weights, which need not be newer. Raises EngineFailure where a request is pending; a second call gives back
        what there is again."""
        ...

    @property
    def version(self) -> int: ...

    def load(self) -> EngineLoad: ...

    async def close(self) -> None: ...
