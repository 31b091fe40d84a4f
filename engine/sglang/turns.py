"""One call of `generate` on its way through the server: mostly one request there, and one more after each end that nobody
asked for. The server stops at the model's own end tokens wherever it stops at any."""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from engine.contract import EngineFailure, Generation, GenerationRequest
from engine.sglang.outcomes import Finish, Part, generation_of
from engine.sglang.protocol import GenerateRequest
from engine.sglang.validation import sampling_params


class Turn:
    def __init__(self, request: GenerationRequest, name: str, stream_interval: int) -> None:
        """`name`: no other turn of this server has it. `stream_interval`: tokens from one piece of the stream to the
        next."""
        self.request, self._name, self._stream_interval = request, name, stream_interval
        self.answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self.held = True  # on this side: the server has no request of it
        self.stopping = False  # the server has been told to abort
        self._parts: list[Part] = []

    @property
    def rid(self) -> str | None:
        """Of its request at the server, once that has answered."""
        meta = self._parts[-1].meta if self._parts else None
        return meta.id if meta else None

    @property
    def num_new(self) -> int:
        return sum(len(part.token_ids) for part in self._parts)

    @property
    def num_left(self) -> int:
        return self.request.max_new_tokens - self.num_new

    def prompt(self) -> NDArray[np.int32]:
        """All tokens so far."""
        new = [token for part in self._parts for token in part.token_ids]
        return np.concatenate((self.request.token_ids, np.array(new, np.int32)))

    def request_of_part(
        self, prompt: NDArray[np.int32], *, extra_key: str | None, rank: int | None, priority: bool
    ) -> GenerateRequest:
        """For what is left of it, once its part has begun. No rid begins another one, since the server aborts all that
        begin so; and none comes twice, since it aborts what has the rid of a stream that ended two seconds ago. The further it is, the more is lost where it has to wait."""
        return GenerateRequest(
            rid=f"{self._name}-{len(self._parts)};",
            input_ids=prompt.tolist(),
            sampling_params=sampling_params(self.request, self.num_left, self._stream_interval),
            return_logprob=True,
            logprob_start_len=-1,
            stream=True,
            extra_key=extra_key,
            priority=len(prompt) if priority else None,
            routed_dp_rank=rank,
        )

    def begin_part(self, vocab_size: int) -> Part:
        part = Part(vocab_size)
        self._parts.append(part)
        return part

    def end(self, finish: Finish) -> None:
        """With what has come."""
        if not self.answer.done():
            try:
                self.answer.set_result(generation_of(self._parts, finish))
            except EngineFailure as failure:
                self.answer.set_exception(failure)

    def fail(self, failure: EngineFailure) -> None:
        if not self.answer.done():
            self.answer.set_exception(failure)
            self.answer.exception()  # seen: where the call has been cancelled nobody else looks
