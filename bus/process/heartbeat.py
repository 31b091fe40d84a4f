"""Heartbeats to the launcher, with the timer lag of the event loop and the lengths of the bus queues.

Heartbeats are datagrams on a separate socket in the node's folder of sockets. They do not use the bus: a
restored process must number its frames as its previous incarnation did, without heartbeats in its log, and a
full queue must not look like a crashed process.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import structlog

from asterism.bus.bus import Bus

LAG_TICK_S = 0.1
LAG_REPORT_INTERVAL_S = 10.0
_SOCKET_NAME = "heartbeats"
_MAX_DATAGRAM_BYTES = 1024


class Heartbeat(msgspec.Struct, frozen=True):
    process: str
    incarnation: int  # counts the starts of the process
    lag_s: float  # largest delay of a timer since the last heartbeat
    waiting: int  # number of frames in the inbox
    unacknowledged: int  # number of sent frames that are not acknowledged
    dropped: int  # number of dropped frames and packets, as in asterism.bus.bus.Bus.dropped


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Heartbeat)


# ---------------------------------------------------------------- the launcher


@contextlib.contextmanager
def receiving_heartbeats(sockets: Path, on_heartbeat: Callable[[Heartbeat], None]) -> Generator[None]:
    """Pass heartbeats to `on_heartbeat` while the context is open. Needs a running event loop."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as receiver:
        receiver.bind(str(sockets / _SOCKET_NAME))
        loop.add_reader(receiver.fileno(), _drain, receiver, on_heartbeat)
        try:
            yield
        finally:
            loop.remove_reader(receiver.fileno())


def _drain(receiver: socket.socket, on_heartbeat: Callable[[Heartbeat], None]) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            try:
                on_heartbeat(_decoder.decode(receiver.recv(_MAX_DATAGRAM_BYTES)))
            except msgspec.DecodeError as error:
                structlog.get_logger().error("heartbeat.dropped", cause=str(error))


# ---------------------------------------------------------------- all other processes


@asynccontextmanager
async def sending_heartbeats(
    process: str, incarnation: int, interval_s: float, sockets: Path, get_bus: Callable[[], Bus | None]
) -> AsyncGenerator[None]:
    """Send a heartbeat at once and then every `interval_s` while the context is open.

    `get_bus` returns the process's bus, or None before the bus exists.
    """
    with _open_sender(sockets) as send:

        def send_heartbeat(lag_s: float) -> Heartbeat:
            heartbeat = Heartbeat(process, incarnation, round(lag_s, 4), *_read_queue_gauges(get_bus()))
            send(heartbeat)
            return heartbeat

        task = asyncio.create_task(_send_heartbeats(send_heartbeat, interval_s), name="heartbeat")
        try:
            yield
        finally:
            task.cancel()


@contextlib.contextmanager
def sending_heartbeats_from_thread(process: str, incarnation: int, interval_s: float, sockets: Path) -> Generator[None]:
    """Send heartbeats from a thread while the context is open, for a process without an event loop and a bus."""
    stop = threading.Event()
    with _open_sender(sockets) as send:

        def send_until_stopped() -> None:
            while True:
                send(Heartbeat(process, incarnation, 0.0, 0, 0, 0))
                if stop.wait(interval_s):
                    return

        thread = threading.Thread(target=send_until_stopped, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@contextlib.contextmanager
def _open_sender(sockets: Path) -> Generator[Callable[[Heartbeat], None]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:

        def send(heartbeat: Heartbeat) -> None:
            with contextlib.suppress(OSError):  # the launcher has exited, or its queue is full
                sender.sendto(_encoder.encode(heartbeat), str(sockets / _SOCKET_NAME))

        yield send


def _read_queue_gauges(bus: Bus | None) -> tuple[int, int, int]:
    return (0, 0, 0) if bus is None else (bus.waiting, sum(bus.unacknowledged.values()), bus.dropped)


async def _send_heartbeats(send_heartbeat: Callable[[float], Heartbeat], interval_s: float) -> None:
    """Send heartbeats until cancelled, and log the largest lag every LAG_REPORT_INTERVAL_S."""
    loop, logger = asyncio.get_running_loop(), structlog.get_logger()
    worst_of_report, report_at, lag_s = 0.0, loop.time() + LAG_REPORT_INTERVAL_S, 0.0
    while True:
        heartbeat = send_heartbeat(lag_s)
        lag_s = await _measure_worst_lag(interval_s)
        worst_of_report = max(worst_of_report, lag_s)
        if loop.time() >= report_at:
            logger.info(
                "loop.measured",
                worst_lag_s=round(worst_of_report, 4),
                waiting=heartbeat.waiting,
                unacknowledged=heartbeat.unacknowledged,
                dropped=heartbeat.dropped,
            )
            worst_of_report, report_at = 0.0, loop.time() + LAG_REPORT_INTERVAL_S


async def _measure_worst_lag(seconds: float) -> float:
    """Return the largest delay of a timer within the next `seconds`."""
    loop = asyncio.get_running_loop()
    worst, end = 0.0, loop.time() + seconds
    while (now := loop.time()) < end:
        tick_s = min(LAG_TICK_S, end - now)
        await asyncio.sleep(tick_s)
        worst = max(worst, loop.time() - now - tick_s)
    return worst
