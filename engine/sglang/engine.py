"""An SGLang server behind engine.contract.Engine.

Every turn is a stream: what the server has generated is here at most `stream_interval` tokens later, so that a turn that is
aborted while the server is paused, or whose connection breaks while the server lives, keeps what it had. Each piece costs
the server about as much as two tokens.

    a turn              waits here while the engine is paused, rests or takes weights; then one request, and its stream
    an abort            the server is told, and answers with what it has; where it cannot (paused, the request not begun, no
                        answer within ABORT_S), the stream is closed, which aborts there too
    the server's death  every turn fails at once, and all that follows; so it is where a turn gets no answer for as long as
                        is waited, no other turn for half of that, and the server says that it is ready: not paused
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Protocol

import structlog

from bus.messages import WeightsPublished
from engine.contract import (
    Capacity,
    EngineFailure,
    EngineLoad,
    Generation,
    GenerationRequest,
    RequestRefused,
    WeightsRefused,
)
from engine.requests import check_request
from engine.sglang.client import SGLangClient
from engine.sglang.counters import Counters
from engine.sglang.errors import ServerSlow, ServerUnreachable
from engine.sglang.memory import ServerMemory
from engine.sglang.outcomes import failure_of
from engine.sglang.placement import Ranks
from engine.sglang.protocol import Aborted, ServerInfo
from engine.sglang.turns import Turn
from engine.sglang.validation import limits_of
from engine.sglang.weights import WeightsWay, extra_key

OFTEN, SELDOM = 16, 256  # tokens of a turn from one piece of its stream to the next
ABORT_S = 5.0
DEATH_S = 10.0  # within it one learns that a server has died which does not answer
UNNAMED = "default"  # weights of a server that was started without --weight-version and has taken none since
POLL_S = 0.5  # from one look at the server's load to the next, which costs both of them some 2 ms of work


class Server(Protocol):
    async def start(self) -> str:
        """Its base URL, once it answers."""
        ...

    @property
    def died(self) -> asyncio.Future[str]:
        """Why, once it has."""
        ...

    async def close(self) -> None: ...


class SGLangEngine:
    """Implements engine.contract.Engine. At most `max_pending` calls may wait for an answer; a further one fails."""

    def __init__(
        self,
        server: Server,
        weights: WeightsWay,
        *,
        model: Path,
        sequence_tokens: int,
        version: int = 0,
        max_pending: int = 1024,
        stream_interval: int = OFTEN,
        connect: Callable[[str], SGLangClient] = SGLangClient,
        abort_s: float = ABORT_S,
        poll_s: float = POLL_S,
        death_s: float = DEATH_S,
        lost: Callable[[str], object] = bool,
    ) -> None:
        """`model`: the folder of the server's checkpoint, whose weights are `version`. `lost` is told why the engine will
        never answer again, before any turn is."""
        self._server, self._weights, self._connect = server, weights, connect
        self._death_s, self._lost = death_s, lost
        self._model, self._sequence_tokens, self._version = model, sequence_tokens, version
        self._stream_interval = stream_interval
        self._max_pending, self._abort_s, self._poll_s = max_pending, abort_s, poll_s
        self._client: SGLangClient | None = None
        self._failure: EngineFailure | None = EngineFailure("the engine has not been started")
        self._turns: dict[int, Turn] = {}  # by sequence_id
        self._numbers = count(1)
        self._life = uuid.uuid4().hex[:8]  # a server that is attached may still have another life's requests
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused = False
        self._open = asyncio.Event()  # turns may go to the server
        self._changing = asyncio.Lock()  # pauses and weights, one after the other
        self._key: str | None = None  # of what the prefix cache may find
        self._working = asyncio.Event()  # the server's load is to be looked at
        self._counters = Counters()
        self._memory = ServerMemory()
        self._answered_at = 0.0  # the last answer to any turn, or change that may have kept the server from it
        self._logger = structlog.get_logger()

    async def start(self) -> Capacity:
        """Raises what the server's start raises; RequestRefused, UnknownAnswer, UpdateRefused where it is not fit."""
        try:
            client = self._client = self._connect(await self._server.start())
            self._info = await client.server_info()
            self._weights.check(self._info)
            self._limits = limits_of(self._model, self._sequence_tokens, self._info)
            await client.resume()  # whoever had it before may have left it paused
            await self._name_weights(client)
            self._counters.see(await client.loads())
        except BaseException:
            await self.close()
            raise
        self._counters.capacity = self._capacity_of(self._info)
        self._ranks = Ranks(self._info.dp_size)
        self._failure = None
        self._open.set()
        self._server.died.add_done_callback(self._server_died)
        self._spawn(self._poll(client))
        return self._counters.capacity

    async def generate(self, request: GenerationRequest) -> Generation:
        client = self._running()
        check_request(request, self._limits.vocab_size, self._limits.sequence_tokens)
        if request.sequence_id in self._turns:
            raise RequestRefused(f"sequence {request.sequence_id} is being generated already")
        if len(self._turns) >= self._max_pending:
            raise EngineFailure(f"{self._max_pending} calls are pending, the engine takes no more")
        turn = Turn(request, f"{self._life}:{request.sequence_id}-{next(self._numbers)}", self._stream_interval)
        self._turns[request.sequence_id] = turn
        self._counters.begin()
        self._working.set()
        playing = self._spawn(self._play(client, turn))
        try:
            await asyncio.wait({playing, turn.answer}, return_when=asyncio.FIRST_COMPLETED)
            if not turn.answer.done():
                playing.result()  # raises what is nobody's outcome
            return turn.answer.result()
        finally:
            playing.cancel()
            del self._turns[request.sequence_id]
            self._counters.end()

    def abort(self, sequence_id: int) -> None:
        turn = self._turns.get(sequence_id)
        if turn is None or turn.stopping:
            return
        turn.stopping = True
        if (rid := turn.rid) is not None and self._open.is_set():
            self._spawn(self._stop(self._running(), turn, rid))
        else:
            turn.end("abort")

    def forget(self, sequence_id: int) -> None:
        """The server's cache gives up what is used least recently, without being told."""
        self._counters.forget(sequence_id)

    async def load_weights(self, weights: WeightsPublished) -> None:
        client = self._running()
        async with self._changing:
            self._open.clear()
            try:
                await self._memory.resume(client, "weights")
                await self._weights.update(client, weights)
                await self._memory.resume(client, "kv_cache")
                if self._paused:
                    await client.pause("in_place")
            except WeightsRefused:
                raise
            except EngineFailure as failure:
                self._lose(f"the server's weights are not whole: {failure}")
                raise
            finally:
                self._set_open()
            self._version, self._key = weights.version, extra_key(weights)
            self._counters.weights_changed()

    async def pause(self) -> None:
        """In place: what runs keeps its keys and values."""
        client = self._running()
        async with self._changing:
            self._paused = True
            self._set_open()
            try:
                await client.pause("in_place")
            except EngineFailure:
                self._paused = False
                self._set_open()
                raise

    async def resume(self) -> None:
        client = self._running()
        async with self._changing:
            await client.resume()
            self._paused = False
            self._set_open()

    async def release(self) -> None:
        client = self._running()
        async with self._changing:
            if self._turns:
                raise EngineFailure(f"{len(self._turns)} requests are pending")
            self._open.clear()
            try:
                await self._memory.release(client)
            finally:
                self._set_open()

    @property
    def version(self) -> int:
        return self._version

    def load(self) -> EngineLoad:
        self._running()
        return self._counters.load(sum(turn.held for turn in self._turns.values()))

    async def close(self) -> None:
        """What is pending fails. A second call does nothing."""
        client, self._client = self._client, None
        self._fail(EngineFailure("the engine is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if client is not None:
            await self._weights.close()
            await client.close()
        await self._server.close()

    # ---------------------------------------------------------------- one turn

    async def _play(self, client: SGLangClient, turn: Turn) -> None:
        rank = self._ranks.begin(turn.request.sequence_id, turn.request.token_ids)
        try:
            while not turn.answer.done():
                await self._play_part(client, turn, rank)
        except EngineFailure as failure:
            await self._break_off(client, turn, failure)
        finally:
            self._ranks.end(rank)

    async def _play_part(self, client: SGLangClient, turn: Turn, rank: int | None) -> None:
        turn.held = True
        await self._open.wait()
        turn.held = False
        prompt, request = turn.prompt(), turn.request
        part = turn.begin_part(self._limits.vocab_size)
        wire = turn.request_of_part(
            prompt, extra_key=self._key, rank=rank, priority=self._info.enable_priority_scheduling
        )
        try:
            async with aclosing(client.generate_streamed(wire)) as answers:
                async for answer in answers:
                    self._answered_at = asyncio.get_running_loop().time()
                    before = part.meta
                    part.take(answer)
                    self._counters.take(request, prompt, before, part)
        except ServerSlow as failure:
            silent_s = asyncio.get_running_loop().time() - self._answered_at
            if silent_s < failure.waited_s / 2 or not self._open.is_set() or not await client.ready():
                raise
            self._lose(f"the server generates nothing any more: {failure}")
        finally:
            self._counters.keep(request, prompt, part)
        finish = part.finish(request.stop_token_ids)
        if finish == "abort" and not turn.stopping and not turn.num_new:
            raise EngineFailure(f"the server aborted it: {_why(part.meta and part.meta.finish_reason)}")
        if finish is not None:
            turn.end(finish)
        elif turn.stopping:
            turn.end("abort")
        elif turn.num_left == 0:
            turn.end("length")

    async def _break_off(self, client: SGLangClient, turn: Turn, failure: EngineFailure) -> None:
        """What came is kept where the server lives."""
        lost = isinstance(failure, (ServerUnreachable, ServerSlow)) and not turn.stopping
        lives = lost and await client.answers()
        if lost and not lives:  # if it has died, all of its turns end together
            await asyncio.wait({self._server.died}, timeout=self._death_s)
        if turn.stopping or (lives and turn.num_new):
            self._logger.warning(
                "turn.broken_off", trajectory_id=turn.request.sequence_id, tokens=turn.num_new, cause=str(failure)
            )
            turn.end("abort")
        else:
            turn.fail(failure_of(failure, turn.request.sequence_id))

    async def _stop(self, client: SGLangClient, turn: Turn, rid: str) -> None:
        try:
            async with asyncio.timeout(self._abort_s):
                await client.abort(rid)
                await asyncio.wait({turn.answer})
        except (EngineFailure, TimeoutError):
            turn.end("abort")

    # ---------------------------------------------------------------- the whole

    def _running(self) -> SGLangClient:
        if self._failure is not None or self._client is None:
            raise EngineFailure(str(self._failure))
        return self._client

    def _capacity_of(self, info: ServerInfo) -> Capacity:
        if not info.enable_deterministic_inference:
            self._logger.warning("engine.seeds_ignored", cause="the server has no --enable-deterministic-inference")
        if info.disable_radix_cache:
            self._logger.warning("engine.prefixes_not_cached", cause="the server's disable_radix_cache is set")
        pages = info.max_total_num_tokens // info.page_size
        return Capacity(info.dp_size * pages * info.page_size, info.page_size, self._limits.sequence_tokens)

    async def _name_weights(self, client: SGLangClient) -> None:
        """A server that has run already may have other weights than those of its checkpoint. Where requests of a former
        engine are still about to end, it cannot drop what it has cached under those: so that is not to be found."""
        named = (await client.model_info()).weight_version
        if named == UNNAMED:
            await client.name_weights(str(self._version))
        elif named != str(self._version):
            await client.update_from_disk(self._model, str(self._version), flush_cache=False)
            await client.flush_cache()
            self._key = self._life

    async def _poll(self, client: SGLangClient) -> None:
        known = True
        while True:
            await self._working.wait()
            if not self._counters.in_flight:
                self._working.clear()  # a last look
            try:
                self._counters.see(await client.loads())
                known = True
            except EngineFailure as failure:
                if known:
                    self._logger.warning("engine.load_unknown", cause=str(failure))
                known = False
            await asyncio.sleep(self._poll_s)

    def _set_open(self) -> None:
        self._answered_at = asyncio.get_running_loop().time()
        if self._paused or self._memory.released:
            self._open.clear()
        else:
            self._open.set()

    def _server_died(self, died: asyncio.Future[str]) -> None:
        if not died.cancelled():
            self._lose(f"the server ended: {died.result()}")

    def _lose(self, cause: str) -> None:
        if self._failure is None:
            self._lost(cause)
            self._fail(EngineFailure(cause))

    def _fail(self, failure: EngineFailure) -> None:
        self._failure = failure
        for turn in self._turns.values():
            turn.fail(EngineFailure(str(failure)))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _why(reason: object) -> str:
    return reason.message if isinstance(reason, Aborted) else "(no cause)"
