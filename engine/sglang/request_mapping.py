"""Maps the engine's requests to SGLang's, and the limits that requests must respect."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.contract import GenerationRequest, RequestRefused
from engine.sglang.http_api import SamplingParams, ServerInfo


class RequestLimits(msgspec.Struct, frozen=True):
    vocab_size: int  # the server crashes on a token id outside of it
    sequence_tokens: int  # longest sequence: prompt and new tokens


class _VocabularyConfig(msgspec.Struct):
    vocab_size: int


def read_limits(model: Path, sequence_tokens: int, server: ServerInfo) -> RequestLimits:
    """Raises RequestRefused if `sequence_tokens` exceeds the server's limit."""
    if sequence_tokens > server.max_req_input_len:
        raise RequestRefused(
            f"sequences may have {sequence_tokens} tokens, the server accepts at most {server.max_req_input_len} "
            f"(max_req_input_len; context_length is {server.context_length})"
        )
    config = msgspec.json.decode((model / "config.json").read_bytes(), type=_VocabularyConfig)
    return RequestLimits(config.vocab_size, sequence_tokens)


def build_sampling_params(request: GenerationRequest, max_new_tokens: int, stream_interval: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k or -1,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=not request.stop_token_ids,
        sampling_seed=to_signed(request.seed),
        stream_interval=stream_interval,
    )


def to_signed(seed: int) -> int:
    """The lowest 64 bits as a signed number, which the server requires."""
    return ((seed + 2**63) % 2**64) - 2**63
