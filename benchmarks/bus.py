"""The bus between two processes over ipc, beside pyzmq's own asyncio sockets; and the event log. JSON last.

    python -m benchmarks.bus [--quick]

A message is a StartGroup of 64 ids and 200 characters: encoded by its sender, decoded by its receiver, either way. Bus
and bare sockets (PUSH and PULL, one frame a message) take turns, a round each, and the ratio is the median of the
rounds' ratios. The round trip is of one message at a time, with nothing else on the way. The peers are so many buses in
two processes, each answering a message of the one measured; then `messages` are streamed, and the memory of both ends
looked at. `--quick` streams fewer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from benchmarks._bus_crowd import name_of
from benchmarks._bus_peer import MEASURER, MESSAGE, PEER, plain_endpoint
from benchmarks._event_log import log_events_per_s, story_ms
from benchmarks._memory import resident_mib
from bus.codec import decode
from bus.transport import Bus
from bus.zeromq import zmq_bus
from configs.schema import Bus as BusConfig

CROWDS = 2  # processes that hold the peers
ROUNDS = 5
_MARKS = 10  # at which memory is looked at


class Pair:
    """This process and another one, both ways between them."""

    def __init__(self, bus: Bus, socket: zmq.asyncio.Socket, peer: Process) -> None:
        self._bus = bus
        self._socket = socket
        self._peer = peer

    def _tell(self, line: str) -> None:
        assert self._peer.stdin is not None
        self._peer.stdin.write(f"{line}\n".encode())

    async def _receive_plain(self) -> None:
        decode(await self._socket.recv())

    async def rate(self, way: str, messages: int) -> float:
        """Messages a second, from the first to the last."""
        receive: Callable[[], Awaitable[Any]] = self._bus.receive if way == "bus" else self._receive_plain
        self._tell(f"{way} {messages}")
        await receive()
        began = time.perf_counter()
        for _ in range(messages - 1):
            await receive()
        return (messages - 1) / (time.perf_counter() - began)

    async def round_trips_us(self, count: int) -> list[float]:
        trips: list[float] = []
        for _ in range(count):
            began = time.perf_counter()
            await self._bus.send(PEER, MESSAGE)
            await self._bus.receive()
            trips.append(1e6 * (time.perf_counter() - began))
        return sorted(trips)

    async def memory_mib(self) -> tuple[float, float]:
        """Of the receiver and of the sender."""
        self._tell("memory")
        assert self._peer.stdout is not None
        return resident_mib(os.getpid()), float(await self._peer.stdout.readline())

    async def stream(self, messages: int) -> dict[str, float]:
        """Memory after the first tenth, when all queues have been full, and what it has grown by at the end."""
        marks: list[tuple[float, float]] = []
        began = time.perf_counter()
        for _ in range(_MARKS):
            await self.rate("bus", messages // _MARKS)
            marks.append(await self.memory_mib())
        return {
            "streamed_messages": messages,
            "streamed_messages_per_s": messages / (time.perf_counter() - began),
            "receiver_mib": marks[0][0],
            "receiver_growth_mib": marks[-1][0] - marks[0][0],
            "sender_mib": marks[0][1],
            "sender_growth_mib": marks[-1][1] - marks[0][1],
        }


async def between_two(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    peer = await start("benchmarks._bus_peer", str(folder))
    bus = zmq_bus(MEASURER, folder, BusConfig().queue_messages)
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(plain_endpoint(folder))
        pair = Pair(bus, socket, peer)
        await pair.round_trips_us(200)  # until it is there, and warm
        rates = [
            (await pair.rate("bus", options.round), await pair.rate("asyncio", options.round)) for _ in range(ROUNDS)
        ]
        trips = await pair.round_trips_us(options.trips)
        streamed = await pair.stream(options.messages)
        await end(peer)
    await bus.close()
    return {
        "ratio_to_pyzmq_asyncio": median(ours / theirs for ours, theirs in rates),
        "messages_per_s": median(ours for ours, _ in rates),
        "pyzmq_asyncio_messages_per_s": median(theirs for _, theirs in rates),
        "round_trip_p50_us": trips[len(trips) // 2],
        "round_trip_p99_us": trips[len(trips) * 99 // 100],
        **streamed,
    }


async def among_many(folder: Path, peers: int, rounds: int) -> dict[str, float]:
    """Every peer gets a message and sends it back, again and again."""
    share = peers // CROWDS
    crowds = [
        await start("benchmarks._bus_crowd", str(folder), str(share * each), str(share)) for each in range(CROWDS)
    ]
    for crowd in crowds:
        assert crowd.stdout is not None
        await crowd.stdout.readline()
    bus = zmq_bus(MEASURER, folder, BusConfig().queue_messages)
    names = [name_of(number) for number in range(share * CROWDS)]
    took: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        for name in names:
            await bus.send(name, MESSAGE)
        answered = [(await bus.receive()).sender for _ in names]
        took.append(time.perf_counter() - began)
        assert sorted(answered) == sorted(names)
    await bus.close()
    for crowd in crowds:
        await end(crowd)
    return {"peers": len(names), "peers_first_round_s": took[0], "peers_round_ms": 1000 * median(took[1:])}


async def start(module: str, *arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", module, *arguments, stdin=PIPE, stdout=PIPE)


async def end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


async def measure(options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = await between_two(folder, options)
        figures |= await among_many(folder, options.peers, options.peer_rounds)
        log = {
            "log_events_per_s": log_events_per_s(folder / "log"),
            "story_ms_1m_events": story_ms(folder / "story", options.events),
        }
        return figures | log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="streams 500,000 messages instead of 10 million")
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--events", type=int, default=1_000_000, help="in the event log")
    options = parser.parse_args()
    options.messages = 500_000 if options.quick else 10_000_000
    options.round = 30_000 if options.quick else 100_000
    options.trips = 3_000 if options.quick else 20_000
    options.peer_rounds = 4 if options.quick else 20
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    figures = uvloop.run(measure(options))
    for key, value in figures.items():
        print(f"{key:30} {value:14,.1f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
