"""From the engine's request to the server's. Nothing is sent that the server could not bear: a token id outside the
vocabulary ends its process."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.contract import GenerationRequest, RequestRefused
from engine.sglang.protocol import SamplingParams, ServerInfo


class Limits(msgspec.Struct, frozen=True):
    vocab_size: int
    sequence_tokens: int  # of the longest sequence, prompt and new tokens


class _ModelConfig(msgspec.Struct):
    vocab_size: int


def limits_of(model: Path, sequence_tokens: int, server: ServerInfo) -> Limits:
    """Raises RequestRefused where the server takes no sequence of that length."""
    if sequence_tokens > server.max_req_input_len:
        raise RequestRefused(
            f"a sequence may have {sequence_tokens} tokens, the server takes {server.max_req_input_len} "
            f"(max_req_input_len; context_length is {server.context_length})"
        )
    config = msgspec.json.decode((model / "config.json").read_bytes(), type=_ModelConfig)
    return Limits(config.vocab_size, sequence_tokens)


def sampling_params(request: GenerationRequest, max_new_tokens: int, stream_interval: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k or -1,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=not request.stop_token_ids,
        sampling_seed=signed(request.seed),
        stream_interval=stream_interval,
    )


def signed(seed: int) -> int:
    """Its lowest 64 bits, as the server takes them."""
    return ((seed + 2**63) % 2**64) - 2**63
