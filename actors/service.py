"""The receive loop of an actor that works rather than decides: every message becomes a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from bus.codec import MalformedFrame
from bus.messages import Envelope, Shutdown
from bus.transport import Bus

Work = Coroutine[Any, Any, None]
Started = Callable[[Envelope, "asyncio.Task[None]"], None]


async def serve(
    bus: Bus,
    take: Callable[[Envelope], Work | None],
    *,
    started: Started | None = None,
    room: Callable[[Envelope], Awaitable[None]] | None = None,
) -> None:
    """Until Shutdown; tasks that are under way then are cancelled. A task that raises ends them all.

    `take` answers at once with what there is to do, or None; `started` is told its task, before it runs and before the
    next message is received. A message is taken when `room` returns, and none is received before, so that those who send
    wait; without it, what is in flight is bounded by those who ask.
    """
    tasks: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as group:
        while not isinstance((envelope := await _next(bus)).message, Shutdown):
            if room is not None:
                await room(envelope)
            if (work := take(envelope)) is not None:
                task = group.create_task(work)
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                if started is not None:
                    started(envelope, task)
        for task in tasks:
            task.cancel()


async def _next(bus: Bus) -> Envelope:
    """The next message; a frame that is none is dropped, and said."""
    while True:
        try:
            return await bus.receive()
        except MalformedFrame as error:
            structlog.get_logger().error("frame.dropped", cause=str(error))
