"""An SGLang server behind asterism.engine.contract.Engine.

Every turn is a stream: the engine receives each generated token at most `stream_interval` tokens
later. So a turn keeps its tokens if it is aborted while the server is paused, or if its connection
breaks while the server lives. Each piece of the stream costs the server about as much as two
tokens.

    turn          waits while the engine is paused, has released its memory or loads weights; then the engine sends
                  one streamed request
    abort         the engine aborts the request on the server, which responds with the tokens so far; without a
                  response within ABORT_TIMEOUT_S (server paused, request not started), the engine closes the
                  stream, which aborts on the server too
    server death  all pending and later turns fail immediately. The engine also declares the server dead if a turn
                  times out, no turn has received anything for half of that timeout, and the server is ready
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Protocol

import structlog

from asterism.bus.messages import WeightsPublished
from asterism.bus.process.waiting import cancel_tasks, start_task
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
from asterism.engine.http.errors import ServerTimeout, ServerUnreachable
from asterism.engine.model.hf_checkpoint import load_model_config
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.dp_routing import DataParallelRouter
from asterism.engine.sglang.generate import (
    ABORT_TIMEOUT_S,
    PendingGeneration,
    ServedWeights,
    abort_on_server,
    end_requests,
)
from asterism.engine.sglang.http_api import FinishedByAbort, ServerInfo
from asterism.engine.sglang.load_counters import POLL_INTERVAL_S, LoadCounters, LoadPoller
from asterism.engine.sglang.responses import to_engine_failure
from asterism.engine.sglang.server_control import ServerControl
from asterism.engine.sglang.weights import WeightTransport, build_extra_key
from asterism.engine.sglang.weights.adapters import AdapterTransport

SHORT_STREAM_INTERVAL, LONG_STREAM_INTERVAL = 16, 256  # tokens of a turn per piece of its stream
DEATH_TIMEOUT_S = 10.0  # time for the process watcher to confirm that an unresponsive server died
# Version of a server that was started without --weight-version and never updated.
DEFAULT_WEIGHT_VERSION = "default"


class ServerHandle(Protocol):
    async def start(self) -> str:
        """Return the base URL once the server is ready."""
        ...

    @property
    def death(self) -> asyncio.Future[str]:
        """The cause of death, set when the server dies."""
        ...

    async def close(self) -> None: ...


class SGLangEngine:
    """An engine of one SGLang server. More than `max_pending` concurrent calls fail."""

    def __init__(
        self,
        server: ServerHandle,
        transport: WeightTransport | AdapterTransport,
        *,
        model: Path,
        sequence_tokens: int,
        version: int = 0,
        max_pending: int = 1024,
        stream_interval: int = SHORT_STREAM_INTERVAL,
        connect: Callable[[str], SGLangClient] = SGLangClient,
        abort_timeout_s: float = ABORT_TIMEOUT_S,
        load_poll_s: float = POLL_INTERVAL_S,
        death_timeout_s: float = DEATH_TIMEOUT_S,
        on_engine_lost: Callable[[str], object] = bool,
        keeps_weights: bool = False,
    ) -> None:
        """`model`: the server's checkpoint folder, with weights of `version`. `on_engine_lost` is
        called once with the cause when the engine is lost for good, before any turn fails.
        `keeps_weights`: an external server keeps its weights, whatever their version."""
        self._server, self._transport, self._connect = server, transport, connect
        self._death_timeout_s, self._on_engine_lost = death_timeout_s, on_engine_lost
        self._model, self._sequence_tokens, self._weights = model, sequence_tokens, ServedWeights(version)
        self._stream_interval = stream_interval
        self._max_pending, self._abort_timeout_s, self._keeps_weights = max_pending, abort_timeout_s, keeps_weights
        self._client: SGLangClient | None = None
        self._failure: EngineFailure | None = EngineFailure("the engine has not been started")
        self._pending: dict[int, PendingGeneration] = {}  # calls by sequence_id
        self._request_numbers = count(1)
        # Unique, because an external server can still run requests of an earlier incarnation.
        self._instance_id = uuid.uuid4().hex[:8]
        self._tasks: set[asyncio.Task[None]] = set()
        self._control = ServerControl(transport)
        self._counters = LoadCounters()
        self._load_poller = LoadPoller(self._counters, load_poll_s)
        self._logger = structlog.get_logger()

    async def start(self) -> Capacity:
        """Start the server. Raises the errors of its start, InvalidResponse and UpdateRefused."""
        try:
            client = self._client = self._connect(await self._server.start())
            self._info = await client.get_server_info()
            self._vocab_size = load_model_config(self._model).vocab_size  # larger token ids crash the server
            await client.resume()  # the previous engine can have paused the server
            if await _sync_weight_version(client, self._model, self.version, keeps_weights=self._keeps_weights):
                self._weights = self._weights._replace(extra_key=self._instance_id)
            self._counters.record_rank_loads(await client.get_loads())
        except BaseException:
            await self.close()
            raise
        if not self._info.enable_deterministic_inference:
            self._logger.warning("engine.seeds_ignored", cause="the server has no --enable-deterministic-inference")
        if self._info.disable_radix_cache:
            self._logger.warning("engine.prefix_cache_disabled", cause="the server's disable_radix_cache is set")
        self._counters.capacity = _compute_capacity(self._info, self._sequence_tokens)
        self._router = DataParallelRouter(self._info.dp_size)
        self._failure = None
        self._control.sending_allowed.set()
        self._server.death.add_done_callback(self._on_server_death)
        self._spawn(self._load_poller.run(client))
        return self._counters.capacity

    async def generate(self, request: GenerationRequest, on_tokens: TokenListener | None = None) -> Generation:
        client = self._require_client()
        check_request(request, self._vocab_size, self._sequence_tokens)
        if request.sequence_id in self._pending:
            raise RequestRefused(f"sequence {request.sequence_id} is being generated already")
        if len(self._pending) >= self._max_pending:
            raise EngineFailure(f"{self._max_pending} calls are pending; the engine accepts no more")
        rid_prefix = f"{self._instance_id}:{request.sequence_id}-{next(self._request_numbers)}"
        pending = PendingGeneration(request, rid_prefix, self._stream_interval, on_tokens)
        self._pending[request.sequence_id] = pending
        self._counters.start_request()
        self._load_poller.wake()
        running = self._spawn(self._run_generation(client, pending))
        try:
            await asyncio.wait({running, pending.result}, return_when=asyncio.FIRST_COMPLETED)
            if not pending.result.done():
                running.result()  # raises the task's exception
            return pending.result.result()
        finally:
            running.cancel()
            del self._pending[request.sequence_id]
            self._counters.end_request()

    def abort(self, sequence_id: int) -> None:
        pending = self._pending.get(sequence_id)
        if pending is None or pending.abort_requested:
            return
        pending.abort_requested = True
        if (rid := pending.rid) is not None and self._control.sending_allowed.is_set():
            self._spawn(abort_on_server(self._require_client(), pending, rid, self._abort_timeout_s))
        else:
            pending.complete("abort")

    def release_cache(self, sequence_id: int) -> None:
        """Do nothing: the server evicts its least recently used prefixes."""
        self._counters.prefixes.mark_inactive(sequence_id)

    async def load_weights(self, weights: WeightsPublished) -> None:
        client = self._require_client()
        try:
            adapter = await self._control.load_weights(
                client, weights, lambda: end_requests(client, self._pending.values())
            )
        except WeightsRefused:
            raise
        except EngineFailure as failure:
            self._mark_lost(f"the server's weights are incomplete: {failure}")
            raise
        self._weights = ServedWeights(weights.version, build_extra_key(weights), adapter)
        self._counters.prefixes.clear()

    async def pause(self) -> None:
        """Pause the server in place: running requests keep their KV cache."""
        await self._control.pause(self._require_client())

    async def resume(self) -> None:
        await self._control.resume(self._require_client())

    async def sleep(self) -> None:
        await self._control.release_memory(self._require_client(), self._pending)

    @property
    def version(self) -> int:
        return self._weights.version

    def get_load(self) -> EngineLoad:
        self._require_client()
        return self._counters.get_load(sum(turn.waiting_to_send for turn in self._pending.values()))

    async def close(self) -> None:
        """Fail all pending turns. A second call does nothing."""
        client, self._client = self._client, None
        self._fail_all(EngineFailure("the engine is closed"))
        await cancel_tasks(*self._tasks)
        if client is not None:
            await self._transport.close()
            await client.close()
        await self._server.close()

    # ---------------------------------------------------------------- one turn

    async def _run_generation(self, client: SGLangClient, pending: PendingGeneration) -> None:
        rank = self._router.assign(pending.request.sequence_id, pending.request.token_ids)
        try:
            while not pending.result.done():
                pending.waiting_to_send = True
                pending.stream = self._spawn(self._run_request(client, pending, rank))
                await asyncio.wait({pending.stream})
                if not pending.stream.cancelled():  # otherwise the request is repeated
                    pending.stream.result()
        except EngineFailure as failure:
            await self._handle_failure(client, pending, failure)
        finally:
            self._router.release(rank)
            if pending.stream is not None:
                pending.stream.cancel()

    async def _run_request(self, client: SGLangClient, pending: PendingGeneration, rank: int | None) -> None:
        await self._control.sending_allowed.wait()
        pending.waiting_to_send = pending.must_repeat = False
        prompt, request = pending.build_prompt(), pending.request
        output = pending.start_output(self._vocab_size, self._weights)
        server_request = pending.build_request(
            prompt, self._weights, dp_rank=rank, use_priority=self._info.enable_priority_scheduling
        )
        try:
            async with aclosing(client.generate_streamed(server_request)) as responses:
                async for response in responses:
                    self._control.last_activity_at = asyncio.get_running_loop().time()
                    previous = output.meta
                    pending.add_response(response)
                    self._counters.record_response(request, prompt, previous, output)
        except ServerTimeout as failure:
            unresponsive_s = asyncio.get_running_loop().time() - self._control.last_activity_at
            if (
                unresponsive_s < failure.waited_s / 2
                or not self._control.sending_allowed.is_set()
                or not await client.is_ready()
            ):
                raise
            self._mark_lost(f"the server no longer generates tokens: {failure}")
        finally:
            self._counters.record_computed(request, prompt, output)
        finish = output.get_finish(request.stop_token_ids)
        if finish == "abort" and pending.must_repeat:
            finish = None
        if finish == "abort" and not pending.abort_requested and not pending.num_new_tokens:
            raise EngineFailure(
                f"the server aborted the request: {_get_abort_message(output.meta and output.meta.finish_reason)}"
            )
        if finish is not None:
            pending.complete(finish)
        elif pending.abort_requested:
            pending.complete("abort")
        elif pending.num_remaining_tokens == 0:
            pending.complete("length")

    async def _handle_failure(self, client: SGLangClient, pending: PendingGeneration, failure: EngineFailure) -> None:
        """End the call with its tokens if the server is alive or an abort was requested; fail it otherwise."""
        connection_lost = isinstance(failure, (ServerUnreachable, ServerTimeout)) and not pending.abort_requested
        server_alive = connection_lost and await client.is_responsive()
        if connection_lost and not server_alive:
            # If the server died, all turns fail with that cause.
            await asyncio.wait({self._server.death}, timeout=self._death_timeout_s)
        if pending.abort_requested or (server_alive and pending.num_new_tokens):
            self._logger.warning(
                "turn.truncated",
                trajectory_id=pending.request.sequence_id,
                tokens=pending.num_new_tokens,
                cause=str(failure),
            )
            pending.complete("abort")
        else:
            pending.fail(to_engine_failure(failure, pending.request.sequence_id))

    # ---------------------------------------------------------------- the engine

    def _require_client(self) -> SGLangClient:
        if self._failure is not None or self._client is None:
            raise EngineFailure(str(self._failure))
        return self._client

    def _on_server_death(self, death: asyncio.Future[str]) -> None:
        if not death.cancelled():
            self._mark_lost(f"the server ended: {death.result()}")

    def _mark_lost(self, cause: str) -> None:
        if self._failure is None:
            self._on_engine_lost(cause)
            self._fail_all(EngineFailure(cause))

    def _fail_all(self, failure: EngineFailure) -> None:
        self._failure = failure
        for pending in self._pending.values():
            pending.fail(EngineFailure(str(failure)))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        return start_task(self._tasks, work)


async def _sync_weight_version(client: SGLangClient, model: Path, version: int, *, keeps_weights: bool) -> bool:
    """Make the server serve the checkpoint's weights under `version`, unless the server keeps its own weights.

    Return True if the server had other weights: requests of its previous engine can prevent a flush of the old cache,
    so the caller must hide that cache with a new extra_key.
    """
    loaded_version = (await client.get_model_info()).weight_version
    if loaded_version == str(version):
        return False
    if loaded_version == DEFAULT_WEIGHT_VERSION:
        await client.set_weight_version(str(version))
        return False
    if keeps_weights:
        return False
    await client.update_from_disk(model, str(version))
    await client.flush_cache()
    return True


def _compute_capacity(info: ServerInfo, sequence_tokens: int) -> Capacity:
    pages = info.max_total_num_tokens // info.page_size
    return Capacity(info.dp_size * pages * info.page_size, info.page_size, sequence_tokens)


def _get_abort_message(reason: object) -> str:
    return reason.message if isinstance(reason, FinishedByAbort) else "(no cause given)"
