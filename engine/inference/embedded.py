"""The embedded engine, an asterism.engine.contract.Engine: continuous batching in this process, on a separate thread.

This module runs on the event loop: it checks requests, posts commands to the thread and waits for futures.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from asterism.bus.messages import WeightsPublished
from asterism.configs.errors import UnusableInput
from asterism.engine.contract import (
    Capacity,
    EngineFailure,
    EngineLoad,
    Generation,
    GenerationRequest,
    TokenListener,
    check_request,
)
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.hf.tokenizer import check_vocabulary, load_tokenizer
from asterism.engine.inference.cuda_graphs import CudaGraphCapture
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.inference.engine_thread import EngineThread, FutureResolution, NewTokens
from asterism.engine.inference.kernels.attention_kernels import FastCpuKernels, select_kernels
from asterism.engine.inference.kernels.batch_invariance import (
    NotBatchInvariant,
    check_attention,
    find_batch_invariant_matmul,
)
from asterism.engine.inference.kernels.matmul import Matmul, select_fast_matmul
from asterism.engine.model.experts import supports_grouped_mm
from asterism.engine.model.hf_checkpoint import load_model
from asterism.engine.model.lora_options import LoraOptions
from asterism.engine.weight_transfer.published_loader import PublishedLoader

Result = TypeVar("Result")


class DeviceMissing(UnusableInput):
    """A device that this machine, or this build of torch, does not have."""


def select_device(kind: Literal["cpu", "cuda"], engine_index: int) -> torch.device:
    """Return the device of engine `engine_index` of this machine; engines share GPUs if there are fewer GPUs.

    Raises DeviceMissing.
    """
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise DeviceMissing(f"engine.device is cuda, but torch {torch.__version__} finds no GPU: run `asterism doctor`")
    return torch.device("cuda", engine_index % count)


class EmbeddedEngine:
    """An engine with `threads` torch threads. At most `max_pending` calls wait; further calls raise EngineFailure.

    A step prefills at most `prefill_tokens` and runs at most `max_running` sequences. With `strict` the bits of a token
    depend only on its own sequence; if the machine cannot guarantee this, the engine does not start.
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
        lora: LoraOptions | None = None,
    ) -> None:
        """`lora`: options of published adapters, which each load merges with the base weights."""
        self._checkpoint_folder, self._requested_capacity = Path(checkpoint_folder), capacity
        self._num_threads, self._dtype, self._device = threads, dtype, torch.device(device)
        self._cuda_graphs = cuda_graphs and self._device.type == "cuda"
        self._version, self._max_pending = version, max_pending
        self._prefill_tokens, self._max_running, self._strict = prefill_tokens, max_running, strict
        self._loader = PublishedLoader(dtype, self._device, lora)
        self._pending: set[asyncio.Future[Any]] = set()
        self._failure: EngineFailure | None = EngineFailure("the engine has not been started")
        self._thread: EngineThread | None = None

    async def start(self) -> Capacity:
        """Load the checkpoint and allocate the cache; return the capacity, rounded down to whole pages.

        Raises CheckpointError, UnsupportedModel or UnusableTokenizer for the folder, ValueError for the capacity, and
        NotBatchInvariant.
        """
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread = EngineThread(self._build_core, self._num_threads, self._post_resolutions, self._post_thread_end)
        self._thread.post(lambda: self._post_resolutions([(self._started, None)]))
        await self._started
        self._failure = None
        self._core = self._thread.core
        return self._core.capacity

    async def generate(self, request: GenerationRequest, on_tokens: TokenListener | None = None) -> Generation:
        thread = self._require_thread()
        check_request(request, self._core.vocab_size, self._core.capacity.sequence_tokens)
        future: asyncio.Future[Generation] = self._loop.create_future()
        try:
            return await self._post_and_wait(future, lambda: thread.submit(request, future, on_tokens))
        except asyncio.CancelledError:
            self.abort(request.sequence_id)
            raise

    def abort(self, sequence_id: int) -> None:
        if (thread := self._thread) is not None:  # None: the engine has not started or is closed
            thread.post(lambda: thread.abort(sequence_id))

    def release_cache(self, sequence_id: int) -> None:
        if (thread := self._thread) is not None:
            thread.post(lambda: thread.release_cache(sequence_id))

    async def load_weights(self, weights: WeightsPublished) -> None:
        """Load published weights. Raises WeightsRefused for wrong bytes; the engine then keeps its old weights."""
        thread = self._require_thread()
        future: asyncio.Future[int] = self._loop.create_future()

        def write(core: EngineCore) -> int:
            self._loader.load(weights, core.get_parameters())
            return weights.version

        self._version = await self._post_and_wait(future, lambda: thread.load_weights(write, future))

    async def pause(self) -> None:
        await self._set_paused(True)

    async def resume(self) -> None:
        await self._set_paused(False)

    async def sleep(self) -> None:
        """Stop generating until load_weights. The embedded engine keeps its memory."""
        thread = self._require_thread()
        future: asyncio.Future[None] = self._loop.create_future()
        await self._post_and_wait(future, lambda: thread.sleep(future))

    @property
    def version(self) -> int:
        return self._version

    def get_load(self) -> EngineLoad:
        """Read the counters while the engine's thread runs: each is exact, but two counters can be a step apart."""
        self._require_thread()
        return self._core.get_load()

    async def close(self) -> None:
        """Wait for the thread to end and fail pending calls. A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
            await asyncio.to_thread(thread.join)
            self._fail_pending(EngineFailure("the engine is closed"))

    # ------------------------------------------------------------ between loop and thread

    def _require_thread(self) -> EngineThread:
        if self._failure is not None or self._thread is None:
            raise EngineFailure(str(self._failure))
        return self._thread

    async def _set_paused(self, paused: bool) -> None:
        thread = self._require_thread()
        future: asyncio.Future[None] = self._loop.create_future()
        await self._post_and_wait(future, lambda: thread.set_paused(paused, future))

    async def _post_and_wait(self, future: asyncio.Future[Result], command: Callable[[], None]) -> Result:
        """Post the command and wait until the thread resolves the future."""
        if len(self._pending) >= self._max_pending:
            raise EngineFailure(f"{self._max_pending} calls are pending; the engine accepts no more")
        self._pending.add(future)
        try:
            self._require_thread().post(command)
            return await future
        finally:
            self._pending.discard(future)

    def _resolve_futures(self, resolutions: list[FutureResolution]) -> None:
        for future, result in resolutions:
            if future.done():  # the call was cancelled
                continue
            if isinstance(result, NewTokens):
                result.on_tokens(result.token_ids)
            elif isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _fail_pending(self, failure: EngineFailure) -> None:
        self._failure = failure
        self._resolve_futures([(future, EngineFailure(str(failure))) for future in self._pending])

    # ------------------------------------------------------------ on the engine's thread

    def _build_core(self) -> EngineCore:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the thread's current device, on which graphs are captured
        model = load_model(self._checkpoint_folder, self._dtype)
        if (self._checkpoint_folder / "tokenizer.json").exists():
            check_vocabulary(model.config, load_tokenizer(self._checkpoint_folder))
        return EngineCore(
            model,
            self._requested_capacity,
            self._version,
            prefill_tokens=self._prefill_tokens,
            max_running=self._max_running,
            capture=CudaGraphCapture() if self._cuda_graphs and self._can_capture(model.config) else None,
            matmul=self._find_matmul(model.config) if self._strict else select_fast_matmul(self._device, self._dtype),
            attention_kernels=None if self._strict or self._device.type == "cuda" else FastCpuKernels(),
            device=self._device,
            overlaps_steps=self._device.type == "cuda",
        )

    def _can_capture(self, config: DecoderConfig) -> bool:
        """Return whether a graph can repeat a step. Without a kernel for grouped products, a loop prevents this."""
        experts = config.experts
        if experts is None:
            return True
        return supports_grouped_mm(self._device, self._dtype, (config.hidden_size, experts.expert_size))

    def _find_matmul(self, config: DecoderConfig) -> Matmul:
        if config.experts is not None:
            raise NotBatchInvariant(
                f'determinism is "strict", but {self._checkpoint_folder / "config.json"} has model_type '
                f"{config.model_type}: the number of rows of each expert's product depends on the batch; "
                'set determinism to "fast"'
            )
        if self._device.type != "cpu" or self._dtype != torch.float32:
            raise NotBatchInvariant(
                f'an engine on {self._device} in {self._dtype} cannot be strict; set determinism to "fast"'
            )
        check_attention(select_kernels(self._device), config, self._requested_capacity.sequence_tokens)
        return find_batch_invariant_matmul(config, self._prefill_tokens + self._max_running, self._max_running)

    def _post_resolutions(self, resolutions: list[FutureResolution]) -> None:
        self._loop.call_soon_threadsafe(self._resolve_futures, resolutions)

    def _post_thread_end(self, error: Exception | None) -> None:
        self._loop.call_soon_threadsafe(self._on_thread_end, error)

    def _on_thread_end(self, error: Exception | None) -> None:
        if error is not None and not self._started.done():
            self._started.set_exception(error)
        elif error is not None:
            self._fail_pending(EngineFailure(f"the engine broke: {type(error).__name__}: {error}"))
