"""Retries calls that failed for lack of resources, a bounded number of times. The sandbox makes room before a retry."""

import asyncio
from collections.abc import Callable

import structlog

from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.inside.wire.call_wire import STARVED_CAUSE
from asterism.sandbox.notebooks import Notebook, NotebookTable, SpareNotebooks

MAX_ATTEMPTS = 3  # attempts per call after a lack of resources or the loss of a notebook's state
_MAX_STARVED_ATTEMPTS = 2  # attempts per starved call; each lasts up to sandbox.max_call_extension time limits
_RETRY_DELAYS_S = (0.1, 0.5)  # pauses before the retries; evicted notebooks end meanwhile


class CallRetries:
    """The retry policy of calls. `drop_process` ends the process of an evicted notebook."""

    def __init__(
        self, spares: SpareNotebooks, notebooks: NotebookTable, drop_process: Callable[[Notebook], None]
    ) -> None:
        self._spares, self._notebooks, self._drop_process = spares, notebooks, drop_process
        self._has_warned = False

    async def prepare(self, cause: str, attempt: int) -> None:
        """Make room before a retry: end spare notebooks or evict idle ones. A call starved of CPU needs no room.

        `attempt`: number of the failed attempt, from 0. Raises SandboxFailure after the last attempt.
        """
        is_starved = cause == STARVED_CAUSE
        if is_starved:
            self._warn_of_starvation()
        if attempt == (_MAX_STARVED_ATTEMPTS if is_starved else MAX_ATTEMPTS) - 1:
            raise SandboxFailure(cause)
        evicted = [] if is_starved or self._spares.end() else self._notebooks.select_for_room()
        structlog.get_logger().warning("call.retried", cause=cause, evicted=len(evicted))
        for notebook in evicted:
            self._drop_process(notebook)
        await asyncio.sleep(_RETRY_DELAYS_S[attempt])

    def _warn_of_starvation(self) -> None:
        """Log the warning once; the run also counts the starved trajectories."""
        if not self._has_warned:
            self._has_warned = True
            remedy = "stop other programs, raise sandbox.max_call_extension, or lower sandbox.fork_servers, engine.threads or learner.threads"
            structlog.get_logger().warning("sandbox.starved", cause=STARVED_CAUSE, remedy=remedy)
