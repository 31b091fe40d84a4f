"""An engine of a server with OpenAI's completions API, which generates with weights that never change.

`start` requests the list of models, and then one token, to find the first of completions_api.FORMS that the
server accepts. Each turn is one streamed request. An abort closes its stream, on which servers stop generating.

Unlike other engines, this engine does not guarantee reproducible seeds. Logprobs that the server does not send are NaN.
Without token ids in the responses, the engine encodes the text.

A server that no longer responds is lost: `on_engine_lost` is called once with the cause, and its caller closes the
engine. The turns that the loss ends fail only after this call.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec
import numpy as np
import structlog

from asterism.bus.messages import WeightsPublished
from asterism.bus.process.waiting import cancel_tasks
from asterism.engine.contract import (
    Capacity,
    EngineFailure,
    EngineLoad,
    Generation,
    GenerationRequest,
    RequestRefused,
    TokenListener,
    WeightsRefused,
    check_request,
)
from asterism.engine.hf.tokenizer import FastTokenizer
from asterism.engine.http.errors import (
    InvalidResponse,
    ServerStatusError,
    ServerTimeout,
    ServerUnreachable,
    is_safe_to_repeat,
)
from asterism.engine.http.http_session import HttpSession, make_status_error
from asterism.engine.openai.completions_api import (
    COMPLETIONS_PATH,
    FORMS,
    CompletionForm,
    CompletionOutput,
    ServedModel,
    ServedModels,
    build_body,
    parse_chunk,
)

API_KEY_VARIABLE = "OPENAI_API_KEY"
RETRY_DELAYS_S = (0.5, 2.0, 8.0)
_MODELS_PATH = "/v1/models"
_PROBE_TIMEOUT_S = 10.0
_REFUSED_STATUSES = (400, 404, 413, 422)  # statuses for which a retry has the same result
_DENIED_STATUSES = (401, 403)
_RETRIED_STATUSES = (429, 502, 503, 529)
_DOWN_STATUSES = (502, 503)  # statuses of a proxy without the server behind it


class _PendingCompletion:
    def __init__(self, request: GenerationRequest, output: CompletionOutput, on_tokens: TokenListener | None) -> None:
        self.request, self.output, self.on_tokens = request, output, on_tokens
        self.reading: asyncio.Task[None] | None = None


class OpenAIEngine:
    """An engine of a server with OpenAI's API. More than `max_pending` concurrent calls fail."""

    def __init__(
        self,
        url: str,
        tokenizer: FastTokenizer,
        *,
        sequence_tokens: int,
        model: str = "",
        api_key_variable: str = API_KEY_VARIABLE,
        version: int = 0,
        max_pending: int = 1024,
        max_running: int = 1024,
        request_timeout_s: float = 600.0,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
        on_engine_lost: Callable[[str], object] | None = None,
    ) -> None:
        """`url`: with or without /v1. `model`: by default the server's first model. `sequence_tokens`: limit
        below the server's own. `api_key_variable`: environment variable of the key, which can be unset.
        `max_running`: concurrent requests to the server; further calls wait."""
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        self._url, self._prefix = url, parts.path
        self._tokenizer, self._model, self._version = tokenizer, model, version
        self._key_variable, key = api_key_variable, os.environ.get(api_key_variable, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = HttpSession(f"{parts.scheme}://{parts.netloc}", request_timeout_s, retry_delays_s, headers)
        self._retry_delays_s, self._longest_wait_s = retry_delays_s, request_timeout_s
        self._max_pending, self._max_running, self._sequence_tokens = max_pending, max_running, sequence_tokens
        self._running_slots, self._probe_lock = asyncio.Semaphore(max_running), asyncio.Lock()
        self._on_engine_lost = on_engine_lost
        self._failure: EngineFailure | None = EngineFailure("the engine has not been started")
        self._pending: dict[int, _PendingCompletion] = {}  # calls by sequence_id
        self._resumed = asyncio.Event()
        self._form: CompletionForm = FORMS[0]
        self._generated_tokens = self._prompt_tokens = 0
        self._busy_s, self._busy_since = 0.0, 0.0
        self._logger = structlog.get_logger()

    async def start(self) -> Capacity:
        """Connect. Raises EngineFailure if the server is unreachable, refuses the key, or accepts no form."""
        try:
            served = await self._find_model()
            self._model = served.id
            self._sequence_tokens = min(self._sequence_tokens, served.max_model_len or self._sequence_tokens)
            await self._find_form()
        except EngineFailure as failure:
            await self._session.close()
            raise self._explain(failure) from failure
        self._failure = None
        self._generated_tokens = 0
        self._resumed.set()
        # With one page per sequence, the arbiter leases at most as many sequences as run at once.
        return Capacity(self._sequence_tokens * self._max_running, self._sequence_tokens, self._sequence_tokens)

    async def find_model(self) -> ServedModel:
        """Return the model that `start` would choose. Raises EngineFailure."""
        try:
            return await self._find_model()
        except EngineFailure as failure:
            raise self._explain(failure) from failure

    async def generate(self, request: GenerationRequest, on_tokens: TokenListener | None = None) -> Generation:
        self._require_started()
        check_request(request, self._tokenizer.vocab_size, self._sequence_tokens)
        if request.sequence_id in self._pending:
            raise RequestRefused(f"sequence {request.sequence_id} is being generated already")
        if len(self._pending) >= self._max_pending:
            raise EngineFailure(f"{self._max_pending} calls are pending; the engine accepts no more")
        output = CompletionOutput(request, self._tokenizer, self._tokenizer.vocab_size)
        pending = _PendingCompletion(request, output, on_tokens)
        self._add_pending(pending)
        reading = pending.reading = asyncio.ensure_future(self._read(pending, self._form))
        try:
            await asyncio.wait({reading})
        finally:
            reading.cancel()
            self._remove_pending(pending)
        if reading.cancelled():  # `abort` or `close` has cancelled the task
            self._require_started()
            return output.build_generation(self._version, "abort")
        if (failure := reading.exception()) is not None:
            if self._on_engine_lost is not None and _may_be_loss(failure):
                await self._report_loss(self._on_engine_lost)
            raise self._explain(failure, request.sequence_id) from failure
        return output.build_generation(self._version, output.finish or "abort")

    def abort(self, sequence_id: int) -> None:
        pending = self._pending.get(sequence_id)
        if pending is not None and pending.reading is not None:
            pending.reading.cancel()

    def release_cache(self, sequence_id: int) -> None:
        """Do nothing: the server manages its cache."""

    async def load_weights(self, weights: WeightsPublished) -> NoReturn:
        raise WeightsRefused(f"{self._url}: OpenAI's API cannot load weights; use an embedded or an SGLang engine")

    async def pause(self) -> None:
        """Send no further requests. Requests that have been sent continue."""
        self._require_started()
        self._resumed.clear()

    async def resume(self) -> None:
        self._require_started()
        self._resumed.set()

    async def sleep(self) -> NoReturn:
        raise EngineFailure(f"{self._url}: OpenAI's API cannot free the server's memory")

    @property
    def version(self) -> int:
        return self._version

    def get_load(self) -> EngineLoad:
        """Return the load without the server's own counters. The busy time is the time with a pending request."""
        self._require_started()
        now = time.perf_counter()
        used = sum(len(each.request.token_ids) + len(each.output.token_ids) for each in self._pending.values())
        return EngineLoad(
            running=min(len(self._pending), self._max_running),
            waiting=max(0, len(self._pending) - self._max_running),
            used_tokens=used,
            cached_tokens=0,
            decode_steps=0,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prompt_tokens,
            recomputed_tokens=0,
            evicted_tokens=0,
            preempted=0,
            busy_s=self._busy_s + (now - self._busy_since if self._pending else 0.0),
        )

    async def close(self) -> None:
        """Fail all pending calls. A second call does nothing."""
        self._failure = EngineFailure("the engine is closed")
        await cancel_tasks(*(each.reading for each in self._pending.values()))
        await self._session.close()

    # ---------------------------------------------------------------- the start

    async def _find_model(self) -> ServedModel:
        content = await self._session.get(self._prefix + _MODELS_PATH)
        try:
            models = msgspec.json.decode(content, type=ServedModels).data
        except ValueError as error:  # invalid JSON or UTF-8
            raise InvalidResponse(f"{_MODELS_PATH}: no list of models: {error}") from error
        found = next((each for each in models if self._model in ("", each.id)), None)
        if found is None:
            names = ", ".join(each.id for each in models) or "no model"
            raise EngineFailure(f"the server has no model {self._model!r}; it serves {names}")
        return found

    async def _find_form(self) -> None:
        """Send a token of the vocabulary in each form until the server accepts one."""
        token = self._tokenizer.encode("a", trusted=False)[:1]
        for form in FORMS:
            request = GenerationRequest(0, np.array(token, np.int32), 1)
            output = CompletionOutput(request, self._tokenizer, self._tokenizer.vocab_size)
            try:
                await self._read(_PendingCompletion(request, output, None), form, is_probe=True)
            except ServerStatusError as failure:
                if failure.status not in _REFUSED_STATUSES or form == FORMS[-1]:
                    raise
            else:
                self._form = form
                self._logger.info("engine.attached", url=self._url, model=self._model, **form._asdict())
                return

    # ---------------------------------------------------------------- one turn

    async def _read(self, pending: _PendingCompletion, form: CompletionForm, *, is_probe: bool = False) -> None:
        """Read until the completion ends. Only requests that have received no token are repeated."""
        body = msgspec.json.encode(build_body(pending.request, self._model, form, self._tokenizer))
        for delay_s in (*self._retry_delays_s, None):
            try:
                async with self._running_slots:
                    if not is_probe:
                        await self._resumed.wait()
                    await self._read_stream(pending, body)
                return
            except (ServerUnreachable, ServerStatusError) as failure:
                if pending.output.token_ids or delay_s is None or not is_safe_to_repeat(failure, _RETRIED_STATUSES):
                    raise
                sequence_id = pending.request.sequence_id
                asked_s = failure.retry_after_s if isinstance(failure, ServerStatusError) else 0.0
                wait_s = max(delay_s, min(asked_s, self._longest_wait_s))
                self._logger.warning("request.repeated", sequence_id=sequence_id, wait_s=wait_s, cause=str(failure))
                await asyncio.sleep(wait_s)

    async def _read_stream(self, pending: _PendingCompletion, body: bytes) -> None:
        """Read one stream. Raises ServerUnreachable if the stream ends without a finish reason."""
        output, path = pending.output, self._prefix + COMPLETIONS_PATH
        async with self._session.stream(path, body) as stream, aclosing(stream.iter_json()) as contents:
            async for content in contents:
                if new := output.add_chunk(parse_chunk(content)):
                    self._generated_tokens += len(new)
                    if pending.on_tokens is not None:
                        pending.on_tokens(np.array(new, np.int32))
                if output.is_overrun:  # closing the stream ends a request beyond its stop token or limit
                    return
                if output.has_server_ended:
                    stream.expect_end()
            if output.finish is None:
                raise ServerUnreachable(stream.describe_end(), request_sent=True)

    async def _report_loss(self, on_engine_lost: Callable[[str], object]) -> None:
        """Call `on_engine_lost` once if the server no longer responds."""
        async with self._probe_lock:
            try:
                if self._failure is None:
                    path = self._prefix + _MODELS_PATH
                    status, content = await self._session.send("GET", path, timeout_s=_PROBE_TIMEOUT_S)
                    if status in _DOWN_STATUSES:
                        raise make_status_error(path, status, content)
            except EngineFailure as failure:
                self._failure = EngineFailure(f"{self._url}: the server no longer responds: {failure}")
                on_engine_lost(str(self._failure))

    def _add_pending(self, pending: _PendingCompletion) -> None:
        if not self._pending:
            self._busy_since = time.perf_counter()
        self._pending[pending.request.sequence_id] = pending
        self._prompt_tokens += len(pending.request.token_ids)

    def _remove_pending(self, pending: _PendingCompletion) -> None:
        del self._pending[pending.request.sequence_id]
        if not self._pending:
            self._busy_s += time.perf_counter() - self._busy_since

    def _require_started(self) -> None:
        if self._failure is not None:
            raise EngineFailure(str(self._failure))

    def _explain(self, failure: BaseException, sequence_id: int | None = None) -> BaseException:
        """Return the failure with the server's address and the remedy."""
        if not isinstance(failure, EngineFailure):
            return failure
        if isinstance(failure, RequestRefused):
            return failure
        if isinstance(failure, ServerStatusError) and failure.status in _DENIED_STATUSES:
            remedy = f"set the environment variable {self._key_variable} to a valid key"
            return EngineFailure(f"{self._url}: {failure}; {remedy}")
        is_refused = isinstance(failure, ServerStatusError) and failure.status in _REFUSED_STATUSES
        if is_refused and sequence_id is not None:
            return RequestRefused(f"sequence {sequence_id}: {failure}")
        return EngineFailure(f"{self._url}: {failure}")


def _may_be_loss(failure: BaseException) -> bool:
    if isinstance(failure, ServerStatusError):
        return failure.status in _DOWN_STATUSES
    return isinstance(failure, ServerUnreachable | ServerTimeout)
