"""Builds requests and parses responses of /v1/completions, OpenAI's API for plain prompts, and its common extensions.

Servers accept different requests, so a request has one of FORMS: the prompt as token ids or as text, with or without
the extensions of vLLM and SGLang (https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html), which
llama.cpp ignores. The new token ids of a response come, in this order of preference, from `token_ids` (vLLM, SGLang),
from `logprobs` (llama.cpp, older vLLM), or from the text, of which each piece is encoded separately.
"""

from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType, structs

from asterism.engine.contract import EngineFailure, Generation, GenerationRequest, RequestRefused
from asterism.engine.http.errors import InvalidResponse, ServerStatusError, parse_error
from asterism.policies.dialogue.chat_format import TextTokenizer

COMPLETIONS_PATH = "/v1/completions"
_MAX_STOP_TEXTS = 4  # OpenAI's limit of stop texts per request
_SAMPLING_KEYS = ("temperature", "top_p")  # OpenAI's keys; other keys are extensions
_TOKEN_ID_PREFIX = "token_id:"


class CompletionForm(NamedTuple):
    sends_ids: bool  # whether the prompt is sent as token ids or as text
    has_extensions: bool


FORMS = tuple(CompletionForm(ids, extensions) for extensions in (True, False) for ids in (True, False))


def build_body(
    request: GenerationRequest, model: str, form: CompletionForm, tokenizer: TextTokenizer
) -> dict[str, Any]:
    """Build the JSON of a request. Raises RequestRefused for an option that the form lacks."""
    ids, stops, sampling = request.token_ids.tolist(), request.stop_token_ids, structs.asdict(request.sampling)
    body: dict[str, Any] = {
        "model": model,
        "prompt": ids if form.sends_ids else tokenizer.decode(ids),
        "max_tokens": request.max_new_tokens,
        **{key: sampling.pop(key) for key in _SAMPLING_KEYS},
        "seed": request.seed % 2**31,  # all servers accept this range
        "stream": True,
    }
    if form.sends_ids or form.has_extensions:
        body["logprobs"] = 1
    if form.has_extensions:
        return body | {
            "min_p": 0.0,
            **sampling,
            "top_k": request.sampling.top_k or -1,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(stops),
            "ignore_eos": not stops,
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
    if stops:  # a server with extensions takes token ids; a stop text would also stop at other tokens
        body["stop"] = [tokenizer.decode([token]) for token in stops][:_MAX_STOP_TEXTS]
    for key in request.sampling.truncations.keys() & sampling:
        raise RequestRefused(
            f"sequence {request.sequence_id}: {key} is {sampling[key]}, which the server does not accept"
        )
    return body


# ---------------------------------------------------------------- responses


class CompletionToken(msgspec.Struct, frozen=True):
    """An entry of llama.cpp's logprobs."""

    id: int | None = None
    logprob: float | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """OpenAI's two lists, or llama.cpp's `content`."""

    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    content: list[CompletionToken] | None = None

    def list_ids(self) -> list[int] | None:
        """Return the token ids, or None if the tokens are texts."""
        if self.content is not None:
            ids = [token.id for token in self.content]
            return [token for token in ids if token is not None] if None not in ids else None
        tokens = self.tokens or []
        if not all(token.startswith(_TOKEN_ID_PREFIX) for token in tokens):
            return None
        return [int(token.removeprefix(_TOKEN_ID_PREFIX)) for token in tokens]

    def list_values(self) -> list[float | None]:
        if self.content is not None:
            return [token.logprob for token in self.content]
        return self.token_logprobs or []


class CompletionChoice(msgspec.Struct, frozen=True):
    text: str | UnsetType | None = UNSET
    index: int = 0
    token_ids: list[int] | None = None  # new token ids
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None  # some servers send an empty reason until the end
    stop_reason: int | str | None = None  # vLLM: the stop token, or the stop text
    matched_stop: int | str | None = None  # SGLang: the stop token, or the stop text
    delta: Any = None  # field of the chat API's choices, which have no `text`
    message: Any = None

    @property
    def is_readable(self) -> bool:
        """Return whether the choice contains new tokens or ends the completion; an unknown form could hide a text."""
        if self.text is not UNSET or self.token_ids is not None:
            return True
        return bool(self.finish_reason) and self.delta is None and self.message is None


class CompletionChunk(msgspec.Struct, frozen=True):
    choices: list[CompletionChoice] | None = None  # empty in a chunk with usage only; some servers omit the field
    usage: Any = None
    error: Any = None  # error of a proxy, possibly next to choices


class ServedModel(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None  # only vLLM and SGLang send this limit


class ServedModels(msgspec.Struct, frozen=True):
    data: list[ServedModel]


def parse_chunk(content: bytes) -> CompletionChunk:
    """Parse a chunk. Raises ServerStatusError for an error within a stream, and InvalidResponse."""
    try:
        chunk = msgspec.json.decode(content, type=CompletionChunk)
        problem = _find_problem(chunk)
    except ValueError as error:  # invalid JSON or UTF-8
        chunk, problem = CompletionChunk(), str(error)
    if problem is None:
        return chunk
    if (found := parse_error(content)) is not None:
        raise ServerStatusError(COMPLETIONS_PATH, found[0] or 500, found[1])
    raise InvalidResponse(f"{COMPLETIONS_PATH}: the server sent an invalid chunk: {problem}")


def _find_problem(chunk: CompletionChunk) -> str | None:
    if chunk.error is not None:
        return f"error: {chunk.error}"
    if chunk.choices is None and chunk.usage is None:
        return "it has no `choices`"
    for choice in chunk.choices or ():
        if choice.index != 0:
            return f"it has choice {choice.index}, but one choice was requested"
        if not choice.is_readable:
            return "its choice has no `text`: the server must have the completions API, not only the chat API"
    return None


class CompletionOutput:
    """The new tokens of one request so far."""

    def __init__(self, request: GenerationRequest, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self._stops, self._max_tokens = tuple(request.stop_token_ids), request.max_new_tokens
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []  # NaN where the server sends no logprob
        self.finish: Literal["stop", "length"] | None = None
        self.is_overrun = False  # whether the server has sent tokens after a stop token or over the limit
        self.has_server_ended = False  # whether the server has sent a finish reason

    def add_chunk(self, chunk: CompletionChunk) -> list[int]:
        """Return the new tokens, without tokens after a stop token or over the limit. Raises EngineFailure."""
        if not chunk.choices:
            return []
        choice, num_before = chunk.choices[0], len(self.token_ids)
        token_ids = self._list_new_ids(choice)
        if token_ids and self.has_server_ended:
            raise InvalidResponse("the server sent new tokens after the finish reason")
        logprobs = choice.logprobs.list_values() if choice.logprobs else []
        if len(logprobs) != len(token_ids):
            logprobs = [None] * len(token_ids)
        for token, logprob in zip(token_ids, logprobs, strict=True):
            if self.finish is not None:
                self.is_overrun = True
                break
            self._add_token(token, logprob)
        if choice.finish_reason and not self.has_server_ended:
            self.has_server_ended = True
            if self.finish is None:
                self._end(choice)
        return self.token_ids[num_before:]

    def build_generation(self, version: int, finish: Literal["stop", "length", "abort"]) -> Generation:
        count = len(self.token_ids)
        ids, logprobs = np.array(self.token_ids, np.int32), np.array(self._logprobs, np.float32)
        return Generation(ids, logprobs, np.full(count, version, np.int32), finish)

    def _list_new_ids(self, choice: CompletionChoice) -> list[int]:
        ids = choice.token_ids
        if ids is None and choice.logprobs is not None:
            ids = choice.logprobs.list_ids()
        if ids is None or (choice.text and not ids):
            ids = self._tokenizer.encode(choice.text or "", trusted=True)
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidResponse(f"new token {token} is outside the vocabulary of {self._vocab_size}")
        return ids

    def _add_token(self, token: int, logprob: float | None) -> None:
        self.token_ids.append(token)
        self._logprobs.append(float("nan") if logprob is None else logprob)
        if token in self._stops:
            self.finish = "stop"
        elif len(self.token_ids) >= self._max_tokens:  # encoding a text can give more ids than were generated
            self.finish = "length"

    def _end(self, choice: CompletionChoice) -> None:
        match choice.finish_reason:
            case "length":
                self.finish = "length"
            case "stop":
                if self._stops:  # the server has cut off the stop token
                    self._add_token(self._find_stop_token(choice), None)
                self.finish = "stop"
            case reason:
                raise EngineFailure(f"the server ended the completion: {reason}")

    def _find_stop_token(self, choice: CompletionChoice) -> int:
        """Return the stop token that the server names, or the request's first stop token."""
        matched = choice.matched_stop if choice.stop_reason is None else choice.stop_reason
        return matched if isinstance(matched, int) and matched in self._stops else self._stops[0]
