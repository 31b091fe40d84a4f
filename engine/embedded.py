"""The embedded engine: continuous batching in this process, on one thread of its own, behind engine.contract.Engine.

This is the event loop's side: it checks requests, posts commands to the thread and waits for futures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from bus.messages import WeightsPublished
from engine.batching import ContinuousBatch
from engine.checkpoint import load_model
from engine.contract import Capacity, EngineFailure, EngineLoad, Generation, GenerationRequest
from engine.engine_thread import Delivery, EngineThread
from engine.graphs import CudaCapture
from engine.kernels import kernels_for
from engine.products import WHOLE, Products
from engine.qwen3 import Qwen3Config
from engine.requests import check_request
from engine.row_trial import RowsDepend, check_attention, products_that_keep_rows
from engine.tokenizer import check_vocabulary, load_tokenizer
from engine.weights import load_published

Result = TypeVar("Result")


class EmbeddedEngine:
    """Implements engine.contract.Engine. `threads` are torch's, set for the engine's own thread.

    At most `max_pending` calls may wait for an answer; a further one fails with EngineFailure. A step reads at most
    `prefill_tokens` of prompts beside its at most `max_running` sequences' new tokens. With `strict` a token's bits depend
    on its own sequence alone, or the engine does not start.
    """

    def __init__(
        self,
        checkpoint_folder: Path | str,
        capacity: Capacity,
        *,
        threads: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        cuda_graphs: bool = True,
        version: int = 0,
        max_pending: int = 65_536,
        prefill_tokens: int = 512,
        max_running: int = 256,
        strict: bool = False,
    ) -> None:
        self._folder, self._wanted = Path(checkpoint_folder), capacity
        self._threads, self._dtype, self._device = threads, dtype, torch.device(device)
        self._cuda_graphs = cuda_graphs and self._device.type == "cuda"
        self._version, self._max_pending = version, max_pending
        self._prefill_tokens, self._max_running, self._strict = prefill_tokens, max_running, strict
        self._pending: set[asyncio.Future[Any]] = set()
        self._failure: EngineFailure | None = EngineFailure("the engine has not been started")
        self._thread: EngineThread | None = None

    async def start(self) -> Capacity:
        """Load the checkpoint and allocate the cache. The capacity, cut to whole pages.

        Raises what engine.checkpoint and engine.tokenizer raise about the folder, ValueError about the capacity,
        engine.row_trial.RowsDepend.
        """
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread = EngineThread(self._build, self._threads, self._deliver_soon, self._ended_soon)
        self._thread.post(lambda: self._deliver_soon([(self._started, None)]))
        await self._started
        self._failure = None
        self._core = self._thread.core
        return self._core.capacity

    async def generate(self, request: GenerationRequest) -> Generation:
        thread = self._running()
        check_request(request, self._core.vocab_size, self._core.capacity.sequence_tokens)
        future: asyncio.Future[Generation] = self._loop.create_future()
        try:
            return await self._answer(future, lambda: thread.submit(request, future))
        except asyncio.CancelledError:
            self.abort(request.sequence_id)
            raise

    def abort(self, sequence_id: int) -> None:
        if (thread := self._thread) is not None:  # a closed engine holds nothing
            thread.post(lambda: thread.abort(sequence_id))

    def forget(self, sequence_id: int) -> None:
        if (thread := self._thread) is not None:
            thread.post(lambda: thread.forget(sequence_id))

    async def load_weights(self, weights: WeightsPublished) -> None:
        """EngineFailure if the published bytes are not what they should be; the engine then goes on as it was."""
        thread = self._running()
        future: asyncio.Future[int] = self._loop.create_future()

        def write(core: ContinuousBatch) -> int:
            load_published(weights, core.parameters())
            return weights.version

        self._version = await self._answer(future, lambda: thread.load(write, future))

    async def pause(self) -> None:
        await self._set_paused(True)

    async def resume(self) -> None:
        await self._set_paused(False)

    async def release(self) -> None:
        """It keeps its memory."""
        thread = self._running()
        future: asyncio.Future[None] = self._loop.create_future()
        await self._answer(future, lambda: thread.rest(future))

    @property
    def version(self) -> int:
        return self._version

    def load(self) -> EngineLoad:
        """Counters of the engine's thread, read while it runs: each is true, together they may be a step apart."""
        self._running()
        return self._core.load()

    async def close(self) -> None:
        """What is pending fails; returns when the thread has ended. A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
            await asyncio.to_thread(thread.join)
            self._fail(EngineFailure("the engine is closed"))

    # ------------------------------------------------------------ between loop and thread

    def _running(self) -> EngineThread:
        if self._failure is not None or self._thread is None:
            raise EngineFailure(str(self._failure))
        return self._thread

    async def _set_paused(self, paused: bool) -> None:
        thread = self._running()
        future: asyncio.Future[None] = self._loop.create_future()
        await self._answer(future, lambda: thread.set_paused(paused, future))

    async def _answer(self, future: asyncio.Future[Result], command: Callable[[], None]) -> Result:
        """Post the command and wait until the thread answers it."""
        if len(self._pending) >= self._max_pending:
            raise EngineFailure(f"{self._max_pending} calls are pending, the engine takes no more")
        self._pending.add(future)
        try:
            self._running().post(command)
            return await future
        finally:
            self._pending.discard(future)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for future, result in deliveries:
            if future.done():  # its caller was cancelled
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _fail(self, failure: EngineFailure) -> None:
        self._failure = failure
        self._deliver([(future, EngineFailure(str(failure))) for future in self._pending])

    # ------------------------------------------------------------ on the engine's thread

    def _build(self) -> ContinuousBatch:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread: graphs are captured on the current one
        model = load_model(self._folder, self._dtype).to(self._device)
        if (self._folder / "tokenizer.json").exists():
            check_vocabulary(model.config, load_tokenizer(self._folder))
        return ContinuousBatch(
            model,
            self._wanted,
            self._version,
            prefill_tokens=self._prefill_tokens,
            max_running=self._max_running,
            capture=CudaCapture() if self._cuda_graphs else None,
            products=self._products(model.config) if self._strict else WHOLE,
        )

    def _products(self, config: Qwen3Config) -> Products:
        if self._device.type != "cpu" or self._dtype != torch.float32:
            raise RowsDepend(f"an engine on {self._device} in {self._dtype} cannot be strict")
        check_attention(kernels_for(self._device), config, self._wanted.sequence_tokens)
        return products_that_keep_rows(config, self._prefill_tokens + self._max_running, self._max_running)

    def _deliver_soon(self, deliveries: list[Delivery]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, deliveries)

    def _ended_soon(self, error: Exception | None) -> None:
        self._loop.call_soon_threadsafe(self._ended, error)

    def _ended(self, error: Exception | None) -> None:
        if error is not None and not self._started.done():
            self._started.set_exception(error)
        elif error is not None:
            self._fail(EngineFailure(f"the engine broke: {type(error).__name__}: {error}"))
