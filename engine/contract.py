"""The interface of an inference engine, embedded or SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from asterism.bus.messages import TurnGenerated, TurnRequested, WeightsPublished
from asterism.configs.schema.algorithm import Sampling
from asterism.configs.schema.dialogue import MAX_STOP_TOKENS as MAX_STOP_TOKENS


class EngineFailure(Exception):
    """An infrastructure failure of the engine; it never counts as an answer. `str(error)` is the cause."""


class RequestRefused(EngineFailure):
    """The engine can never serve the request, such as a token id outside the vocabulary or a too long sequence."""


class WeightsRefused(EngineFailure):
    """The published weights cannot be read, or differ from their announcement. The engine keeps its old weights."""


class Capacity(msgspec.Struct, frozen=True):
    """The size of the KV cache in tokens. Sequences use whole pages, and share the pages of equal prefixes."""

    kv_tokens: int
    page_tokens: int
    sequence_tokens: int  # tokens of the longest sequence that the engine accepts

    def count_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


class GenerationRequest(msgspec.Struct, frozen=True):
    sequence_id: int  # id of the trajectory, whose cached prefix is reused if the ids match
    token_ids: NDArray[np.int32]  # [T], the whole sequence up to this request
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0  # a token's draw depends only on the seed and the token's position

    @classmethod
    def from_turn(cls, turn: TurnRequested) -> GenerationRequest:
        return cls(
            sequence_id=turn.trajectory_id,
            token_ids=np.frombuffer(turn.token_ids, np.int32),
            max_new_tokens=turn.max_new_tokens,
            sampling=turn.sampling,
            stop_token_ids=turn.stop_token_ids,
            seed=turn.seed,
        )


def check_request(request: GenerationRequest, vocab_size: int, sequence_tokens: int) -> None:
    """Check a request before it reaches a model, for every engine. Raises RequestRefused."""
    name, ids = f"sequence {request.sequence_id}", request.token_ids
    if len(ids) == 0:
        raise RequestRefused(f"{name}: the prompt is empty")
    if request.max_new_tokens < 1:
        raise RequestRefused(f"{name}: max_new_tokens is {request.max_new_tokens}; it must be at least 1")
    if len(ids) + request.max_new_tokens > sequence_tokens:
        requested = f"{len(ids)} tokens and up to {request.max_new_tokens} new tokens"
        raise RequestRefused(f"{name}: {requested} exceed the limit of {sequence_tokens} tokens per sequence")
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        position = int(np.argmax(outside))
        raise RequestRefused(
            f"{name}: token id {int(ids[position])} at position {position} is outside the vocabulary of {vocab_size}"
        )
    try:
        request.sampling.check()
    except ValueError as error:
        raise RequestRefused(f"{name}: sampling: {error}") from None
    if len(request.stop_token_ids) > MAX_STOP_TOKENS:
        raise RequestRefused(f"{name}: {len(request.stop_token_ids)} stop tokens; the limit is {MAX_STOP_TOKENS}")


class Generation(msgspec.Struct, frozen=True):
    """N new tokens, including the stop token."""

    token_ids: NDArray[np.int32]  # [N]
    # [N], log p of the sampled token under softmax(logits / temperature), before top-p and top-k; temperature 1 for
    # greedy tokens
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]  # [N], policy version of each token
    finish: Literal["stop", "length", "abort"]
    cached_tokens: int = 0  # tokens of the request that were found in the cache

    def build_answer(self, turn: TurnRequested) -> TurnGenerated:
        return TurnGenerated(
            trajectory_id=turn.trajectory_id,
            turn=turn.turn,
            lease=turn.lease,
            token_ids=self.token_ids.tobytes(),
            logprobs=self.logprobs.tobytes(),
            versions=self.versions.tobytes(),
            finish=self.finish,
        )


# A function of the tokens generated since its last call, int32 [n] with n > 0, such as `asyncio.Queue.put_nowait`. It
# runs on the event loop and must not raise.
TokenListener = Callable[[NDArray[np.int32]], object]


class EngineLoad(msgspec.Struct, frozen=True):
    """The load of an engine, as in asterism.bus.messages.EngineLoadReported. Counters are 0 when the engine starts."""

    running: int  # sequences that decode, and the sequence in prefill
    waiting: int  # requests that wait for pages or a row
    used_tokens: int  # KV tokens in pages that are not free
    cached_tokens: int  # part of used_tokens, in pages that no running sequence holds
    decode_steps: int
    generated_tokens: int
    prefilled_tokens: int  # tokens of requests that were computed, not found in the cache
    recomputed_tokens: int  # part of prefilled_tokens, computed again after eviction, preemption or release
    evicted_tokens: int  # tokens of evicted cached pages
    preempted: int  # preemptions of running sequences, for lack of pages
    busy_s: float  # time spent computing


class Engine(Protocol):
    async def start(self) -> Capacity: ...

    async def generate(self, request: GenerationRequest, on_tokens: TokenListener | None = None) -> Generation:
        """Generate a turn. Raises RequestRefused before the model gets the request, EngineFailure if the engine breaks.

        `on_tokens` gets the new tokens while they are generated: all of them, in order, before the call returns.
        """
        ...

    def abort(self, sequence_id: int) -> None:
        """Make the pending generate return its tokens with finish "abort". No effect without a pending generate."""
        ...

    def release_cache(self, sequence_id: int) -> None:
        """Free the sequence's KV tokens."""
        ...

    async def load_weights(self, weights: WeightsPublished) -> None:
        """Load the weights between two decode steps; later tokens have the new version.

        Idle sequences lose their cached keys and values; running sequences keep theirs. Raises WeightsRefused.
        """
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Free the memory of weights and cache, if the engine can. Requests then wait until load_weights returns.

        load_weights then accepts equal versions, too. Raises EngineFailure if a request is pending. A second call frees
        memory that was allocated after the first call.
        """
        ...

    @property
    def version(self) -> int: ...

    def get_load(self) -> EngineLoad: ...

    async def close(self) -> None: ...
