"""A deciding process recovers from its log, then runs its receive loop until Shutdown."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import structlog

from asterism.actors.runtime.decider_loop import DeciderLoop, Observer, Service, make_steady_clock
from asterism.actors.runtime.recovery import Recovery, recover
from asterism.bus.bus import Bus, BusFactory
from asterism.bus.codec import encode
from asterism.bus.event_log.writer import EventLog
from asterism.bus.messages import Envelope, RunStarted
from asterism.bus.process.heartbeat import sending_heartbeats
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.decider import Decider


class ProcessIncarnation(msgspec.Struct, frozen=True):
    """A start of a process, as the launcher numbers it."""

    process: str
    epoch: int  # epoch of the process's links; deciding processes keep it in all incarnations of one launch
    number: int = 1


async def decide_until_shutdown(
    incarnation: ProcessIncarnation,
    run: RunConfig,
    folder: RunFolder,
    deciders: Mapping[str, Decider],
    started: RunStarted,
    services: Mapping[str, Service],
    observer: Observer,
    open_bus: BusFactory,
    background: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Recover and run the loop. Raises NotRecoverable and EventLogFailure.

    Recovery runs in a thread, while heartbeats continue; only this thread uses deciders and observer meanwhile.
    `background` starts after recovery and is cancelled at the end.
    """
    name, epoch, window = incarnation.process, incarnation.epoch, run.bus.queue_messages
    path = folder.events / f"{name}.sqlite"
    addresses = [name if actor == name else f"{name}/{actor}" for actor in deciders]
    start_frames = [encode(Envelope(name, address, started)) for address in addresses]
    bus = None
    async with (
        AsyncExitStack() as exit_stack,
        sending_heartbeats(name, incarnation.number, run.supervision.heartbeat_s, folder.sockets, lambda: bus),
    ):
        recovery = log = None
        if run.log.events:
            recovery = await asyncio.to_thread(
                recover, path, name, epoch, deciders, services, window, start_frames, observer
            )
            log = EventLog(path, compress=run.log.compress, keep_steps=run.log.keep_steps)
            exit_stack.callback(log.close)
        bus = open_bus(name, epoch)
        exit_stack.push_async_callback(bus.close)
        await _start_or_resume(bus, name, start_frames, recovery, log, services)
        if background is not None:
            exit_stack.callback(asyncio.create_task(background()).cancel)
        clock = make_steady_clock(recovery.last_event_time if recovery is not None else 0.0)
        await DeciderLoop(bus, log, deciders, services, clock, observer).run()


async def _start_or_resume(
    bus: Bus,
    process: str,
    start_frames: Sequence[bytes],
    recovery: Recovery | None,
    log: EventLog | None,
    services: Mapping[str, Service],
) -> None:
    """Put the start frames before any frame from outside, or resume from the log."""
    if recovery is not None:
        await resume_from_log(recovery, log, bus, services)
        return
    for frame in start_frames:
        await bus.send_frame(process, frame)


async def resume_from_log(recovery: Recovery, log: EventLog | None, bus: Bus, services: Mapping[str, Service]) -> None:
    """Restore the links. Must run in the turn of the event loop that made the bus, before any frame arrives."""
    bus.restore(recovery.build_link_state(), recovery.received)
    if log is not None:
        for decision in recovery.undecided:
            log.append_decision(*decision)
    for actor, message in recovery.service_messages:
        await services[actor](message)
    structlog.get_logger().info("process.recovered", num_events=recovery.num_events, recover_s=recovery.recovery_s)
