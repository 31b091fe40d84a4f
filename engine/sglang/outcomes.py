"""From the server's answers to the engine's: what came is checked, put together, and named."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Literal, TypeVar

import numpy as np
from msgspec import UNSET

from engine.contract import EngineFailure, Generation, RequestRefused
from engine.sglang.errors import ServerRefused, UnknownAnswer
from engine.sglang.protocol import Aborted, Finished, GenerateAnswer, MetaInfo, Stopped

Finish = Literal["stop", "length", "abort"]
Value = TypeVar("Value")


class Part:
    """What came of one request to the server so far. Its answers hold all tokens so far, or the new ones alone, as the
    server was started."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.meta: MetaInfo | None = None  # of the newest answer

    def take(self, answer: GenerateAnswer) -> int:
        """How many tokens are new. Raises UnknownAnswer, and is as it was, where the answer is at odds with itself."""
        meta, before = answer.meta_info, len(self.token_ids)
        total = meta.completion_tokens
        token_ids = _newest("output_ids", answer.output_ids, before, total)
        sampled = _newest("output_token_logprobs", meta.output_token_logprobs, before, total)
        for position, (token_id, (logprob, named, _)) in enumerate(zip(token_ids, sampled, strict=True), before):
            if not 0 <= token_id < self._vocab_size:
                raise UnknownAnswer(f"new token {position} is {token_id}, outside the vocabulary of {self._vocab_size}")
            if named != token_id:
                raise UnknownAnswer(f"new token {position} is {token_id}, its logprob is that of {named}")
            if logprob is None:
                raise UnknownAnswer(f"new token {position} has no logprob: the model gave what is not finite")
        _check_spans(meta)
        self.token_ids += token_ids
        self.logprobs += [logprob for logprob, _, _ in sampled if logprob is not None]
        self.meta = meta
        return len(token_ids)

    @property
    def versions(self) -> list[int]:
        """One for each token."""
        if self.meta is None:
            return []
        if not self.meta.weight_versions:
            return [_number(self.meta.weight_version)] * len(self.token_ids)
        spans = self.meta.weight_versions
        return list(chain.from_iterable(repeat(_number(span.version), span.end - span.start) for span in spans))

    def finish(self, stop_token_ids: Sequence[int]) -> Finish | None:
        """None where the request has to go on: it is under way, or ended at a token at which it should not."""
        match self.meta.finish_reason if self.meta else None:
            case None:
                return None
            case Finished():
                return "length"
            case Stopped(matched=matched):
                return "stop" if matched in stop_token_ids else None
            case Aborted():
                return "abort"


def generation_of(parts: Sequence[Part], finish: Finish) -> Generation:
    cached = parts[0].meta.cached_tokens if parts and parts[0].meta else 0
    return Generation(
        token_ids=np.array([token for part in parts for token in part.token_ids], np.int32),
        logprobs=np.array([logprob for part in parts for logprob in part.logprobs], np.float32),
        versions=np.array([version for part in parts for version in part.versions], np.int32),
        finish=finish,
        cached_tokens=0 if cached is UNSET else cached,
    )


def failure_of(error: EngineFailure, sequence_id: int) -> EngineFailure:
    """A request that the server calls a bad one will not get better."""
    if isinstance(error, ServerRefused) and error.status == 400:
        return RequestRefused(f"sequence {sequence_id}: {error.message}")
    return error


def _newest(field: str, values: Sequence[Value], before: int, total: int) -> Sequence[Value]:
    new = total - before
    if new < 0:
        raise UnknownAnswer(f"completion_tokens is {total}, {before} tokens had come")
    if new and len(values) not in (new, total):
        raise UnknownAnswer(f"{field} has {len(values)} entries; {total} tokens have come, {new} of them are new")
    return values[len(values) - new :]


def _number(version: str) -> int:
    if not version.isdecimal():
        raise UnknownAnswer(f"the server's weights have the version {version!r}, which is no number")
    return int(version)


def _check_spans(meta: MetaInfo) -> None:
    end = 0
    for span in meta.weight_versions:
        if span.start != end or span.end < span.start:
            raise UnknownAnswer(f"weight_versions goes from {end} on with a span from {span.start} to {span.end}")
        end = span.end
    if meta.weight_versions and end != meta.completion_tokens:
        raise UnknownAnswer(f"weight_versions has spans for {end} of {meta.completion_tokens} tokens")
