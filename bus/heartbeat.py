"""Heartbeats: a process says to its launcher that its event loop turns, how late it serves a timer, and what waits.

They are datagrams beside the bus, in the node's folder of sockets: a process that goes on where its last life was killed
must number what it sends as that one did, and nobody logs heartbeats; and a full queue must not look like a dead process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import structlog

from bus.transport import Bus

TICK_S = 0.1
REPORT_S = 10.0  # between two lines of the log
_NAME = "heartbeats"
_MAX_BYTES = 1024


class Heartbeat(msgspec.Struct, frozen=True):
    process: str
    life: int  # counts the starts of the process
    lag_s: float  # how late the loop served a timer, at worst since the last one
    waiting: int  # frames that have arrived and are not yet read
    unacknowledged: int  # that it has sent
    dropped: int  # since its start: what bus.transport.Bus.dropped counts


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Heartbeat)


# ---------------------------------------------------------------- the launcher


@contextlib.contextmanager
def listening(sockets: Path, heard: Callable[[Heartbeat], None]) -> Generator[None]:
    """As long as the context is open, `heard` gets every heartbeat. Within a running event loop."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as ear:
        ear.bind(str(sockets / _NAME))
        loop.add_reader(ear.fileno(), _drain, ear, heard)
        try:
            yield
        finally:
            loop.remove_reader(ear.fileno())


def _drain(ear: socket.socket, heard: Callable[[Heartbeat], None]) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            try:
                heard(_decoder.decode(ear.recv(_MAX_BYTES)))
            except msgspec.DecodeError as error:
                structlog.get_logger().error("heartbeat.dropped", cause=str(error))


# ---------------------------------------------------------------- everybody else


@asynccontextmanager
async def beating(
    process: str, life: int, every_s: float, sockets: Path, bus_of: Callable[[], Bus | None]
) -> AsyncGenerator[None]:
    """One heartbeat at once and then every `every_s`, as long as the context is open. Who does not listen hears none.

    `bus_of` gives the process's bus, once it has one.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as mouth:

        def say(lag_s: float) -> Heartbeat:
            heartbeat = Heartbeat(process, life, round(lag_s, 4), *_queues(bus_of()))
            with contextlib.suppress(OSError):  # nobody listens, or does not get round to it
                mouth.sendto(_encoder.encode(heartbeat), str(sockets / _NAME))
            return heartbeat

        beat = asyncio.create_task(_beat(say, every_s), name="heartbeat")
        try:
            yield
        finally:
            beat.cancel()


def _queues(bus: Bus | None) -> tuple[int, int, int]:
    return (0, 0, 0) if bus is None else (bus.waiting, sum(bus.unacknowledged.values()), bus.dropped)


async def _beat(say: Callable[[float], Heartbeat], every_s: float) -> None:
    """Until cancelled. Now and then a line of the log tells the worst lag (invariant 6)."""
    loop, logger = asyncio.get_running_loop(), structlog.get_logger()
    worst_of_report, report_at, lag_s = 0.0, loop.time() + REPORT_S, 0.0
    while True:
        said = say(lag_s)
        lag_s = await _worst_lag(every_s)
        worst_of_report = max(worst_of_report, lag_s)
        if loop.time() >= report_at:
            logger.info(
                "loop.measured",
                worst_lag_s=round(worst_of_report, 4),
                waiting=said.waiting,
                unacknowledged=said.unacknowledged,
                dropped=said.dropped,
            )
            worst_of_report, report_at = 0.0, loop.time() + REPORT_S


async def _worst_lag(seconds: float) -> float:
    """How late a timer was served at worst, within so many seconds."""
    loop = asyncio.get_running_loop()
    worst, end = 0.0, loop.time() + seconds
    while (now := loop.time()) < end:
        tick_s = min(TICK_S, end - now)
        await asyncio.sleep(tick_s)
        worst = max(worst, loop.time() - now - tick_s)
    return worst
