"""The thread that owns the embedded engine's model: it runs commands between steps, and steps while there is work.

Consumes commands from any thread; produces deliveries (a future and what it resolves to), in one call for each step.
Blocks while there is nothing to do or the engine is paused or rests; a command unblocks it. Ends at `stop` or with an error,
and says which by its last call.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from engine.batching import ContinuousBatch, Outcome
from engine.contract import EngineFailure, Generation, GenerationRequest, RequestRefused

Delivery = tuple[asyncio.Future[Any], object]  # an Exception is raised by the future, anything else is its result


class EngineThread:
    """`deliver` and `ended` are called on the engine's thread. The bound of the command queue is the caller's."""

    def __init__(
        self,
        build: Callable[[], ContinuousBatch],
        threads: int,
        deliver: Callable[[list[Delivery]], None],
        ended: Callable[[Exception | None], None],
    ) -> None:
        self._build, self._num_threads = build, threads
        self._deliver, self._ended = deliver, ended
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deliveries: list[Delivery] = []
        self._generating: dict[int, asyncio.Future[Generation]] = {}  # by sequence_id
        self._paused = False
        self._rests = False  # until weights come
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ on any thread

    def post(self, command: Callable[[], None]) -> None:
        """Run it on the engine's thread, after all that were posted before."""
        self._commands.put(command)

    def stop(self) -> None:
        self.post(self._stop)

    def join(self) -> None:
        self._thread.join()

    # ------------------------------------------------------------ commands: on the engine's thread, through `post`

    def submit(self, request: GenerationRequest, future: asyncio.Future[Generation]) -> None:
        try:
            self.core.submit(request)
        except RequestRefused as refusal:
            self._deliveries.append((future, refusal))
        else:
            self._generating[request.sequence_id] = future

    def abort(self, sequence_id: int) -> None:
        self._finish(self.core.abort(sequence_id))

    def forget(self, sequence_id: int) -> None:
        self._finish(self.core.forget(sequence_id))

    def set_paused(self, paused: bool, future: asyncio.Future[None]) -> None:
        self._paused = paused
        self._deliveries.append((future, None))

    def rest(self, future: asyncio.Future[None]) -> None:
        if self._generating:
            self._deliveries.append((future, EngineFailure(f"{len(self._generating)} requests are pending")))
        else:
            self._rests = True
            self._deliveries.append((future, None))

    def load(self, write: Callable[[ContinuousBatch], int], future: asyncio.Future[int]) -> None:
        """`write` the model's weights and return their version; where it fails, they are as they were."""
        try:
            version = write(self.core)
        except EngineFailure as failure:
            self._deliveries.append((future, failure))
        else:
            self.core.weights_changed(version)
            self._rests = False
            self._deliveries.append((future, version))

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._num_threads)
            self.core = self._build()
            self._serve()
        except Exception as error:  # the thread's edge: whoever waits has to hear of it
            self._ended(error)
        else:
            self._ended(None)

    def _serve(self) -> None:
        while not self._stopped:
            if self._paused or self._rests or not self.core.has_work:
                self._commands.get()()
            while not self._stopped and not self._commands.empty():
                self._commands.get()()
            if not self._paused and not self._rests and not self._stopped:
                self._finish(self.core.step())
            if self._deliveries:
                deliveries, self._deliveries = self._deliveries, []
                self._deliver(deliveries)

    def _stop(self) -> None:
        self._stopped = True

    def _finish(self, outcomes: list[Outcome]) -> None:
        for sequence_id, result in outcomes:
            self._deliveries.append((self._generating.pop(sequence_id), result))
