"""The receive loop of generators and executors makes a task of each message."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

import structlog

from asterism.bus.codec import MalformedFrame
from asterism.bus.messages import AnyMessage, Envelope, Shutdown

Work = Coroutine[Any, Any, None]
OnTaskStarted = Callable[[Envelope, "asyncio.Task[None]"], None]


class MessageChannel(Protocol):
    """The part of asterism.bus.bus.Bus that a worker uses."""

    @property
    def process(self) -> str: ...

    async def send(self, to: str, message: AnyMessage) -> None: ...

    async def receive(self) -> Envelope:
        """Receive a message. Raises asterism.bus.codec.MalformedFrame after dropping a frame."""
        ...


async def serve(
    bus: MessageChannel,
    dispatch: Callable[[Envelope], Work | None],
    *,
    on_started: OnTaskStarted | None = None,
    wait_for_capacity: Callable[[Envelope], Awaitable[None]] | None = None,
) -> None:
    """Serve until Shutdown, which cancels the running tasks. An exception in a task cancels all others.

    `dispatch` returns the work for a message, or None, without waiting. `on_started` receives the task of this work,
    before it runs and before the next message is received. Each message waits for `wait_for_capacity`, and no other is
    received meanwhile, so senders get back-pressure. By default, the senders bound the tasks in flight.
    """
    tasks: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as group:
        while not isinstance((envelope := await _receive_next(bus)).message, Shutdown):
            if wait_for_capacity is not None:
                await wait_for_capacity(envelope)
            if (work := dispatch(envelope)) is not None:
                task = group.create_task(work)
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                if on_started is not None:
                    on_started(envelope, task)
        for task in tasks:
            task.cancel()


async def _receive_next(bus: MessageChannel) -> Envelope:
    """Return the next message; malformed frames are logged and dropped."""
    while True:
        try:
            return await bus.receive()
        except MalformedFrame as error:
            structlog.get_logger().error("frame.dropped", cause=str(error))
