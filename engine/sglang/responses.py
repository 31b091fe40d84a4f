"""Validates the server's responses and combines them into a Generation."""

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Literal, TypeVar

import numpy as np
from msgspec import UNSET

from asterism.engine.contract import EngineFailure, Generation, RequestRefused
from asterism.engine.http.errors import InvalidResponse, ServerStatusError
from asterism.engine.sglang.http_api import (
    FinishedByAbort,
    FinishedByLength,
    FinishedByStop,
    GenerateResponse,
    MetaInfo,
)

Finish = Literal["stop", "length", "abort"]
Value = TypeVar("Value")


class RequestOutput:
    """The tokens of one request so far; a response contains all tokens or only new tokens."""

    def __init__(self, vocab_size: int, version: int | None = None) -> None:
        """`version`: the version of all tokens, from an adapter; None: the server reports the versions."""
        self._vocab_size, self._version = vocab_size, version
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.meta: MetaInfo | None = None  # metadata of the newest response

    def add_response(self, response: GenerateResponse) -> None:
        """Add a response. Raises InvalidResponse, and changes nothing, if fields contradict each other."""
        meta, num_before = response.meta_info, len(self.token_ids)
        total = meta.completion_tokens
        token_ids = _select_new("output_ids", response.output_ids, num_before, total)
        sampled = _select_new("output_token_logprobs", meta.output_token_logprobs, num_before, total)
        for position, (token_id, (logprob, named, _)) in enumerate(zip(token_ids, sampled, strict=True), num_before):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidResponse(
                    f"new token {position} is {token_id}, outside the vocabulary of {self._vocab_size}"
                )
            if named != token_id:
                raise InvalidResponse(f"new token {position} is {token_id}, but its logprob is for token {named}")
            if logprob is None:
                raise InvalidResponse(f"new token {position} has no logprob: the model's output was not finite")
        _check_spans(meta)
        self.token_ids += token_ids
        self.logprobs += [logprob for logprob, _, _ in sampled if logprob is not None]
        self.meta = meta

    @property
    def versions(self) -> list[int]:
        """Return the weight version of each token."""
        if self.meta is None:
            return []
        if self._version is not None:
            return [self._version] * len(self.token_ids)
        if not self.meta.weight_versions:
            return [_parse_version(self.meta.weight_version)] * len(self.token_ids)
        spans = self.meta.weight_versions
        return list(chain.from_iterable(repeat(_parse_version(span.version), span.end - span.start) for span in spans))

    def get_finish(self, stop_token_ids: Sequence[int]) -> Finish | None:
        """Return None while the request runs, and after a stop at a token outside `stop_token_ids`."""
        match self.meta.finish_reason if self.meta else None:
            case None:
                return None
            case FinishedByLength():
                return "length"
            case FinishedByStop(matched=matched):
                return "stop" if matched in stop_token_ids else None
            case FinishedByAbort():
                return "abort"


def build_generation(outputs: Sequence[RequestOutput], finish: Finish) -> Generation:
    cached = outputs[0].meta.cached_tokens if outputs and outputs[0].meta else 0
    return Generation(
        token_ids=np.array([token for output in outputs for token in output.token_ids], np.int32),
        logprobs=np.array([logprob for output in outputs for logprob in output.logprobs], np.float32),
        versions=np.array([version for output in outputs for version in output.versions], np.int32),
        finish=finish,
        cached_tokens=0 if cached is UNSET else cached,
    )


def to_engine_failure(error: EngineFailure, sequence_id: int) -> EngineFailure:
    """Return RequestRefused for status 400, because a retry has the same result; otherwise `error`."""
    if isinstance(error, ServerStatusError) and error.status == 400:
        return RequestRefused(f"sequence {sequence_id}: {error.message}")
    return error


def _select_new(field: str, values: Sequence[Value], num_before: int, total: int) -> Sequence[Value]:
    new = total - num_before
    if new < 0:
        raise InvalidResponse(f"completion_tokens is {total}, after {num_before} received tokens")
    if new and len(values) not in (new, total):
        raise InvalidResponse(f"{field} has {len(values)} entries, expected {total} or the {new} new ones")
    return values[len(values) - new :]


def _parse_version(version: str) -> int:
    if not version.isdecimal():
        raise InvalidResponse(f"the server's weight version is {version!r}, not a number")
    return int(version)


def _check_spans(meta: MetaInfo) -> None:
    end = 0
    for span in meta.weight_versions:
        if span.start != end or span.end < span.start:
            raise InvalidResponse(f"weight_versions has a span from {span.start} to {span.end} after position {end}")
        end = span.end
    if meta.weight_versions and end != meta.completion_tokens:
        raise InvalidResponse(f"weight_versions covers {end} of {meta.completion_tokens} tokens")
