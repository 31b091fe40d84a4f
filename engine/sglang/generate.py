"""Generates one turn: usually one request to the server, and another after each unrequested stop.

The server stops at the model's own end tokens whenever it stops at any token.
"""

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asterism.engine.contract import EngineFailure, Generation, GenerationRequest, TokenListener
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import GenerateRequest, GenerateResponse, SamplingParams, format_sampling
from asterism.engine.sglang.responses import Finish, RequestOutput, build_generation

ABORT_TIMEOUT_S = 5.0  # limit of the server's response to an abort
_ABORT_INTERVAL_S = 0.2  # interval of aborts: an abort misses a request on its way to the server's scheduler


class ServedWeights(NamedTuple):
    """The weights that new requests use."""

    version: int
    extra_key: str | None = None  # key of the prefix cache
    adapter: str | None = None  # the adapter's name on the server; None: the server's weights, whose version it reports


class PendingGeneration:
    def __init__(
        self, request: GenerationRequest, rid_prefix: str, stream_interval: int, on_tokens: TokenListener | None = None
    ) -> None:
        """`rid_prefix`: unique on the server. `stream_interval`: tokens per piece of the stream without a listener."""
        self.request, self._rid_prefix, self._on_tokens = request, rid_prefix, on_tokens
        self._stream_interval = stream_interval if on_tokens is None else 1
        self.result: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self.waiting_to_send = True  # the server does not have the request yet
        self.abort_requested = False
        self.stream: asyncio.Task[None] | None = None  # stream of the newest request
        self.must_repeat = False  # the newest request ends early, and another one continues it
        self._outputs: list[RequestOutput] = []

    @property
    def rid(self) -> str | None:
        """Return the newest request's id on the server, or None before the server's first response."""
        meta = self._outputs[-1].meta if self._outputs else None
        return meta.id if meta else None

    @property
    def num_new_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self._outputs)

    @property
    def num_remaining_tokens(self) -> int:
        return self.request.max_new_tokens - self.num_new_tokens

    def build_prompt(self) -> NDArray[np.int32]:
        """Return the call's prompt and all tokens generated so far."""
        new = [token for output in self._outputs for token in output.token_ids]
        return np.concatenate((self.request.token_ids, np.array(new, np.int32)))

    def build_request(
        self, prompt: NDArray[np.int32], weights: ServedWeights, *, dp_rank: int | None, use_priority: bool
    ) -> GenerateRequest:
        """Return the request for the remaining tokens; call `start_output` first.

        No rid is a prefix of another, because an abort applies to every rid with its prefix. No
        rid is reused, because the server aborts the rid of a stream again two seconds after this
        stream ended. Longer prompts have a higher priority, because more of their KV cache is lost
        while they wait.
        """
        return GenerateRequest(
            rid=f"{self._rid_prefix}-{len(self._outputs)};",
            input_ids=prompt.tolist(),
            sampling_params=self._build_sampling_params(),
            return_logprob=True,
            logprob_start_len=-1,
            stream=True,
            extra_key=weights.extra_key,
            priority=len(prompt) if use_priority else None,
            routed_dp_rank=dp_rank,
            lora_path=weights.adapter,
        )

    def _build_sampling_params(self) -> SamplingParams:
        request = self.request
        return SamplingParams(
            **format_sampling(request.sampling),
            max_new_tokens=self.num_remaining_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=not request.stop_token_ids,
            sampling_seed=((request.seed + 2**63) % 2**64) - 2**63,  # the server needs a signed number
            stream_interval=self._stream_interval,
        )

    def start_output(self, vocab_size: int, weights: ServedWeights) -> RequestOutput:
        output = RequestOutput(vocab_size, None if weights.adapter is None else weights.version)
        self._outputs.append(output)
        return output

    def add_response(self, response: GenerateResponse) -> None:
        """Add a response to the newest output. Raises InvalidResponse."""
        output = self._outputs[-1]
        num_before = len(output.token_ids)
        output.add_response(response)
        if self._on_tokens is not None and len(output.token_ids) > num_before and not self.result.done():
            self._on_tokens(np.array(output.token_ids[num_before:], np.int32))

    def complete(self, finish: Finish) -> None:
        """End the call with the tokens received so far."""
        if not self.result.done():
            try:
                self.result.set_result(build_generation(self._outputs, finish))
            except EngineFailure as failure:
                self.result.set_exception(failure)

    def fail(self, failure: EngineFailure) -> None:
        if not self.result.done():
            self.result.set_exception(failure)
            self.result.exception()  # asyncio logs an exception that is never retrieved


async def abort_on_server(client: SGLangClient, pending: PendingGeneration, rid: str, timeout_s: float) -> None:
    """Abort one request. Without a response within the timeout, the call ends with the tokens so far."""
    try:
        async with asyncio.timeout(timeout_s):
            await client.abort(rid)
            await asyncio.wait({pending.result})
    except (EngineFailure, TimeoutError):
        pending.complete("abort")


async def end_requests(client: SGLangClient, all_pending: Iterable[PendingGeneration]) -> None:
    """End the requests of these calls, which keep their tokens and wait until requests can be sent again."""
    streams: set[asyncio.Task[None]] = set()
    for pending in all_pending:
        if pending.stream is not None and not pending.waiting_to_send:
            pending.must_repeat = True
            streams.add(pending.stream)
            if pending.rid is None:  # the request has no tokens; it can be unsent
                pending.stream.cancel()
    deadline = asyncio.get_running_loop().time() + ABORT_TIMEOUT_S
    while streams and asyncio.get_running_loop().time() < deadline:
        await client.abort_all()
        _, streams = await asyncio.wait(streams, timeout=_ABORT_INTERVAL_S)
    for stream in streams:
        stream.cancel()
    if streams:
        await asyncio.wait(streams)
