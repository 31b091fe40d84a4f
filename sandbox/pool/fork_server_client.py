"""Sends calls to one fork server, counts its slots, and pings it while calls are in flight.

A fork server runs `SLOTS_PER_SERVER` calls concurrently: enough to keep its core busy, and few
enough that each call ends soon. Calls that sleep or never end would block these slots. While other
calls wait, a call therefore becomes long and holds an extra slot, after `_LONG_AFTER_ANSWERS` later
answers, or when its server has not answered for a while.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import structlog

from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.hosts.host import Host
from asterism.sandbox.inside.wire.frames import Frame
from asterism.sandbox.inside.wire.server_settings import ServerSettings
from asterism.sandbox.pool.server_connection import ServerConnection

SLOTS_PER_SERVER = 64  # concurrent calls of one fork server; further calls wait
MAX_CALLS_PER_SERVER = 512  # bound that includes long calls
SERVER_DIED = "fork server died"
_LONG_AFTER_ANSWERS = 2 * SLOTS_PER_SERVER
_MODULE = "asterism.sandbox.inside.server.boot"
_PING_INTERVAL_S = 10.0  # interval while calls are in flight
_MAX_UNANSWERED_PINGS = 6  # unanswered pings after which the server is killed and replaced
_PING_ID, _MEASURE_ID = 0, -1  # ids of frames that belong to no call
_MEASURE_TIMEOUT_S = 1.0


class _InFlightCall(NamedTuple):
    answer: asyncio.Future[Frame]
    num_answered_before: int  # number of the server's answers when the call began


class ForkServerClient:
    """A client of one fork server. Each call gets one answer or SandboxFailure. The server's exit calls `on_lost`."""

    def __init__(self, host: Host, on_lost: Callable[[ForkServerClient], None], failures: int = 0) -> None:
        self._on_lost = on_lost
        self.failures = failures  # consecutive failures without an answer, including those of predecessors
        self._calls: dict[int, _InFlightCall] = {}
        self._connection = ServerConnection(host, _MODULE, self._on_frame, self._on_end)
        self.alive = False
        self.slots_in_use = 0
        # Requests that wait for a slot of this server only.
        self.pinned_waiters: deque[asyncio.Future[ForkServerClient]] = deque()
        self._long_calls: set[int] = set()  # in-flight calls that hold extra slots
        self._num_answered = 0
        self._num_answered_at_check = 0
        self._checks_without_answer = 0
        self._unanswered_pings = 0
        self._ping_timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        return self._connection.pid

    @property
    def has_free_slot(self) -> bool:
        return self.slots_in_use < min(SLOTS_PER_SERVER + len(self._long_calls), MAX_CALLS_PER_SERVER)

    def mark_long_calls(self) -> None:
        """Mark overtaken calls, or all calls of a server that has not answered for a while."""
        if self._num_answered == self._num_answered_at_check:
            self._checks_without_answer += 1
        else:
            self._checks_without_answer = 0
        self._num_answered_at_check = self._num_answered
        has_stalled = self._checks_without_answer > len(self._long_calls) // SLOTS_PER_SERVER
        if has_stalled:
            self._checks_without_answer = 0
        for number, call in self._calls.items():
            if has_stalled or self._num_answered - call.num_answered_before >= _LONG_AFTER_ANSWERS:
                self._long_calls.add(number)

    async def start(self, settings: ServerSettings) -> Frame:
        greeting = await self._connection.start(settings)
        self.alive = True
        return greeting

    async def call(self, frame: Frame) -> Frame:
        """Send a call and return its answer. Raises SandboxFailure if the server exits. Cancellation kills the call."""
        if not self.alive:
            raise SandboxFailure(SERVER_DIED)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._calls[frame["id"]] = _InFlightCall(answer, self._num_answered)
        self._connection.send(frame)
        if self._ping_timer is None:
            self._schedule_ping()
        try:
            return await answer
        except asyncio.CancelledError:
            self._connection.send({"op": "kill", "id": frame["id"]})
            raise
        finally:
            self._calls.pop(frame["id"], None)
            self._long_calls.discard(frame["id"])

    async def measure_notebooks(self) -> dict[int, int]:
        """Return the bytes of each notebook, or nothing if the server does not answer. Allows one caller at a time."""
        try:
            answer = await asyncio.wait_for(self.call({"op": "measure", "id": _MEASURE_ID}), _MEASURE_TIMEOUT_S)
        except (SandboxFailure, TimeoutError):
            return {}
        return {int(notebook_id): size for notebook_id, size in answer["sizes"].items()}

    def end_notebook(self, notebook_id: int) -> None:
        if self.alive:
            self._connection.send({"op": "end", "session": notebook_id})

    def end_spare_notebooks(self, pause_s: float) -> None:
        """End the spare notebooks; the server forks none for `pause_s`."""
        if self.alive:
            self._connection.send({"op": "end_spares", "pause_s": pause_s})

    async def stop(self) -> None:
        self.alive = False
        self._stop_pings()
        await self._connection.stop()

    def _schedule_ping(self) -> None:
        self._ping_timer = asyncio.get_running_loop().call_later(_PING_INTERVAL_S, self._send_ping)

    def _send_ping(self) -> None:
        self._ping_timer = None
        if not self._calls:  # the next call starts the pings again
            return
        if self._unanswered_pings >= _MAX_UNANSWERED_PINGS:
            structlog.get_logger().error("fork_server.ping_timed_out", pid=self.pid, calls=len(self._calls))
            self._connection.abort()
            return
        self._unanswered_pings += 1
        self._connection.send({"op": "ping", "id": _PING_ID})
        self._schedule_ping()

    def _stop_pings(self) -> None:
        if self._ping_timer is not None:
            self._ping_timer.cancel()

    def _on_frame(self, frame: Frame) -> None:
        self._unanswered_pings = 0
        if frame["id"] == _PING_ID:
            return
        self.failures = 0
        self._num_answered += 1
        call = self._calls.pop(frame["id"], None)
        if call is not None and not call.answer.done():
            call.answer.set_result(frame)

    def _on_end(self) -> None:
        self.alive = False
        self._stop_pings()
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(SandboxFailure(SERVER_DIED))
        self._calls.clear()
        fail_waiters(self.pinned_waiters, SERVER_DIED)
        self._on_lost(self)


def fail_waiters(waiters: deque[asyncio.Future[ForkServerClient]], cause: str) -> None:
    while waiters:
        waiter = waiters.popleft()
        if not waiter.done():
            waiter.set_exception(SandboxFailure(cause))
