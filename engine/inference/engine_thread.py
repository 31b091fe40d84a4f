"""The thread that owns the embedded engine's model: it runs steps while there is work, and commands between steps.

The thread consumes commands from any thread and produces resolutions (a future with its result or new tokens), one
list per step and one before each load of weights. It blocks without work, and while the engine is paused or asleep; a
command unblocks it. It ends at `stop` or with an error; `on_end` is its last call.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asterism.engine.contract import EngineFailure, Generation, GenerationRequest, RequestRefused, TokenListener
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.inference.sequence import SequenceOutcome

FutureResolution = tuple[asyncio.Future[Any], object]  # the future and its exception, result or NewTokens


class NewTokens(NamedTuple):
    on_tokens: TokenListener
    token_ids: NDArray[np.int32]  # [n]


class _TokenStream:
    """The new tokens of one request with a listener."""

    def __init__(self, future: asyncio.Future[Generation], on_tokens: TokenListener) -> None:
        self.future, self._on_tokens = future, on_tokens
        self.num_reported = 0

    def report(self, token_ids: NDArray[np.int32]) -> list[FutureResolution]:
        self.num_reported += len(token_ids)
        return [(self.future, NewTokens(self._on_tokens, token_ids))] if len(token_ids) else []


class EngineThread:
    """The engine's thread, which calls `resolve_futures` and `on_end`. The caller bounds the command queue."""

    def __init__(
        self,
        build_core: Callable[[], EngineCore],
        num_threads: int,
        resolve_futures: Callable[[list[FutureResolution]], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._build_core, self._num_threads = build_core, num_threads
        self._resolve_futures, self._on_end = resolve_futures, on_end
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._resolutions: list[FutureResolution] = []
        self._generate_futures: dict[int, asyncio.Future[Generation]] = {}  # futures by sequence_id
        self._streams: dict[int, _TokenStream] = {}  # streams by sequence_id, for requests with a listener
        self._paused = False
        self._asleep = False  # True until weights are loaded
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ on any thread

    def post(self, command: Callable[[], None]) -> None:
        """Run the command on the engine's thread, after all earlier commands."""
        self._commands.put(command)

    def stop(self) -> None:
        self.post(self._mark_stopped)

    def join(self) -> None:
        self._thread.join()

    # ------------------------------------------------------------ commands: on the engine's thread, through `post`

    def submit(
        self, request: GenerationRequest, future: asyncio.Future[Generation], on_tokens: TokenListener | None = None
    ) -> None:
        try:
            self.core.submit(request)
        except RequestRefused as refusal:
            self._resolutions.append((future, refusal))
        else:
            self._generate_futures[request.sequence_id] = future
            if on_tokens is not None:
                self._streams[request.sequence_id] = _TokenStream(future, on_tokens)

    def abort(self, sequence_id: int) -> None:
        self._add_resolutions(self.core.abort(sequence_id))

    def release_cache(self, sequence_id: int) -> None:
        self._add_resolutions(self.core.release_cache(sequence_id))

    def set_paused(self, paused: bool, future: asyncio.Future[None]) -> None:
        self._paused = paused
        self._finish_step()
        self._resolutions.append((future, None))

    def sleep(self, future: asyncio.Future[None]) -> None:
        if self._generate_futures:
            self._resolutions.append((future, EngineFailure(f"{len(self._generate_futures)} requests are pending")))
        else:
            self._asleep = True
            self._resolutions.append((future, None))

    def load_weights(self, write_weights: Callable[[EngineCore], int], future: asyncio.Future[int]) -> None:
        """Call `write_weights`, which overwrites the weights and returns their version, or raises without changes."""
        self._finish_step()
        self._deliver_resolutions()  # not after the load, which takes seconds
        try:
            version = write_weights(self.core)
        except EngineFailure as failure:
            self._resolutions.append((future, failure))
        else:
            self.core.on_weights_changed(version)
            self._asleep = False
            self._resolutions.append((future, version))

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._num_threads)
            self.core = self._build_core()
            self._run_loop()
        except Exception as error:  # the top of this thread: pending calls must fail with the error
            self._on_end(error)
        else:
            self._on_end(None)

    def _run_loop(self) -> None:
        while not self._stopped:
            if self._paused or self._asleep or not self.core.has_work:
                self._commands.get()()
            while not self._stopped and not self._commands.empty():
                self._commands.get()()
            if not self._paused and not self._asleep and not self._stopped:
                self._add_resolutions(self.core.step())
                self._report_new_tokens()
            self._deliver_resolutions()

    def _mark_stopped(self) -> None:
        self._stopped = True

    def _deliver_resolutions(self) -> None:
        if self._resolutions:
            resolutions, self._resolutions = self._resolutions, []
            self._resolve_futures(resolutions)

    def _finish_step(self) -> None:
        """Wait for the launched step and report its tokens: the next step can be much later."""
        self._add_resolutions(self.core.finish_step())
        self._report_new_tokens()

    def _add_resolutions(self, outcomes: list[SequenceOutcome]) -> None:
        for sequence_id, result in outcomes:
            stream = self._streams.pop(sequence_id, None)
            if stream is not None and isinstance(result, Generation):
                self._resolutions += stream.report(result.token_ids[stream.num_reported :])
            self._resolutions.append((self._generate_futures.pop(sequence_id), result))

    def _report_new_tokens(self) -> None:
        for sequence_id, stream in self._streams.items():
            self._resolutions += stream.report(self.core.read_generated(sequence_id, stream.num_reported))
