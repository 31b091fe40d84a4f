"""A process that decides, from its log and its bus to its end: it begins, or goes on where its last life was killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import structlog

from actors.clock import steady_clock
from actors.decider_loop import DeciderLoop, Observer, Service
from actors.recovery import Recovery, recover
from bus.codec import encode
from bus.event_log import EventLog
from bus.heartbeat import beating
from bus.joining import Join
from bus.messages import Envelope, RunStarted
from bus.transport import Bus
from configs.run_folder import RunFolder
from configs.schema import Run
from policies.decider import Decider


class Life(msgspec.Struct, frozen=True):
    """One start of a process, as the launcher numbers it."""

    process: str
    session: int  # of a process that decides the same in all lives since the launcher began
    number: int = 1


async def decide_until_shutdown(
    life: Life,
    run: Run,
    folder: RunFolder,
    deciders: Mapping[str, Decider],
    started: RunStarted,
    services: Mapping[str, Service],
    observer: Observer,
    join: Join,
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Raises NotRecoverable and EventLogFailure.

    What its log has it decides on again in a thread, while heartbeats go on: meanwhile deciders and observer are that
    thread's alone. `beside` begins after it, and is cancelled at the end.
    """
    path = folder.events / f"{life.process}.sqlite"
    begin = [encode(Envelope(life.process, address, started)) for address in _addresses(life.process, deciders)]
    bus = None
    async with (
        AsyncExitStack() as ends,
        beating(life.process, life.number, run.supervision.heartbeat_s, folder.sockets, lambda: bus),
    ):
        recovery = log = None
        if run.log.events:
            known = (path, life.process, life.session, deciders, services, run.bus.queue_messages, begin, observer)
            recovery = await asyncio.to_thread(recover, *known)
            log = EventLog(path, compress=run.log.compress, keep_steps=run.log.keep_steps)
            ends.callback(log.close)
        bus = join(life.process, life.session)
        ends.push_async_callback(bus.close)
        if recovery is None:
            for frame in begin:  # in the inbox before anything that arrives from outside
                await bus.send_frame(life.process, frame)
        else:
            await go_on(recovery, log, bus, services)
        if beside is not None:
            ends.callback(asyncio.create_task(beside()).cancel)
        clock = steady_clock(recovery.at if recovery is not None else 0.0)
        await DeciderLoop(bus, log, deciders, services, clock, observer).run()


async def go_on(recovery: Recovery, log: EventLog | None, bus: Bus, services: Mapping[str, Service]) -> None:
    """To be called in the turn of the event loop in which the bus was made: nothing has arrived yet."""
    bus.restore(recovery.links(), recovery.taken)
    if log is not None:
        for decision in recovery.undecided:
            log.decided(*decision)
    for actor, message in recovery.served:
        await services[actor](message)
    structlog.get_logger().info("process.recovered", num_events=recovery.num_events, recover_s=recovery.seconds)


def _addresses(process: str, deciders: Mapping[str, Decider]) -> Sequence[str]:
    """An actor's own, where a process holds several."""
    return [process if actor == process else f"{process}/{actor}" for actor in deciders]
