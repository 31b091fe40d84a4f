"""Checks of a generation request that every engine makes before the request reaches a model."""

from __future__ import annotations

import math

import numpy as np

from engine.contract import GenerationRequest, RequestRefused

MAX_STOP_TOKENS = 16


def check_request(request: GenerationRequest, vocab_size: int, sequence_tokens: int) -> None:
    """Raises RequestRefused with the sequence, and the position and id of the first bad token."""
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
    _check_sampling(name, request)


def _check_sampling(name: str, request: GenerationRequest) -> None:
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise RequestRefused(f"{name}: temperature is {request.temperature}; it must be 0 or more")
    if not 0 < request.top_p <= 1:
        raise RequestRefused(f"{name}: top_p is {request.top_p}; it must be in (0, 1]")
    if request.top_k < 0:
        raise RequestRefused(f"{name}: top_k is {request.top_k}; it must not be negative")
    if len(request.stop_token_ids) > MAX_STOP_TOKENS:
        raise RequestRefused(f"{name}: {len(request.stop_token_ids)} stop tokens; the limit is {MAX_STOP_TOKENS}")
