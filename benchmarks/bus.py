"""Measure the bus between two processes over ipc, pyzmq's asyncio sockets, and the event log. Prints a JSON line last.

    python -m benchmarks.bus [--quick]

A message is a StartGroup of 64 ids and 200 characters; the sender encodes it and the receiver
decodes it, over the bus and over the bare sockets (PUSH and PULL, one frame per message). Bus and
sockets alternate by round; the ratio is the median of the rounds' ratios. The round trip is
measured with one message at a time on an idle bus. The peers are separate buses in two processes;
each answers a message of the measured bus. Then `messages` messages are streamed, and the memory
of both ends is measured. `--quick` streams fewer messages.
"""

import asyncio
import os
import resource
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import zmq
import zmq.asyncio

from asterism.bus.bus import Bus
from asterism.bus.codec import decode
from asterism.bus.transport.zeromq import open_zmq_bus
from asterism.configs.schema.machines import BusConfig as BusConfig
from benchmarks.support.benchmark_main import Flag, Options, benchmark_main
from benchmarks.support.echo_peer import MEASURER, MESSAGE, PEER, format_peer_name, plain_endpoint
from benchmarks.support.log_speed import measure_log_events_per_s, measure_story_ms
from benchmarks.support.process_usage import read_resident_mib

PEER_PROCESSES = 2  # processes that run the peers of the measured bus
ROUNDS = 5
_MARKS = 10  # number of memory measurements in a stream


class ProcessPair:
    """This process and an echo process, connected by a bus and by bare sockets."""

    def __init__(self, bus: Bus, socket: zmq.asyncio.Socket, peer: Process) -> None:
        self._bus = bus
        self._socket = socket
        self._peer = peer

    def _send_command(self, line: str) -> None:
        assert self._peer.stdin is not None
        self._peer.stdin.write(f"{line}\n".encode())

    async def _receive_plain(self) -> None:
        decode(await self._socket.recv())

    async def measure_rate(self, way: str, messages: int) -> float:
        """Measure the messages per second."""
        receive: Callable[[], Awaitable[Any]] = self._bus.receive if way == "bus" else self._receive_plain
        self._send_command(f"{way} {messages}")
        await receive()
        began = time.perf_counter()
        for _ in range(messages - 1):
            await receive()
        return (messages - 1) / (time.perf_counter() - began)

    async def measure_round_trips_us(self, count: int) -> list[float]:
        trips: list[float] = []
        for _ in range(count):
            began = time.perf_counter()
            await self._bus.send(PEER, MESSAGE)
            await self._bus.receive()
            trips.append(1e6 * (time.perf_counter() - began))
        return sorted(trips)

    async def measure_memory_mib(self) -> tuple[float, float]:
        """Measure the resident MiB of the receiver and of the sender."""
        self._send_command("memory")
        assert self._peer.stdout is not None
        return read_resident_mib(os.getpid()), float(await self._peer.stdout.readline())

    async def stream(self, messages: int) -> dict[str, float]:
        """Measure memory after a tenth of the messages, which has filled all queues, and its growth until the end."""
        marks: list[tuple[float, float]] = []
        began = time.perf_counter()
        for _ in range(_MARKS):
            await self.measure_rate("bus", messages // _MARKS)
            marks.append(await self.measure_memory_mib())
        return {
            "streamed_messages": messages,
            "streamed_messages_per_s": messages / (time.perf_counter() - began),
            "receiver_mib": marks[0][0],
            "receiver_growth_mib": marks[-1][0] - marks[0][0],
            "sender_mib": marks[0][1],
            "sender_growth_mib": marks[-1][1] - marks[0][1],
        }


async def measure_pair(folder: Path, options: Options) -> dict[str, float]:
    count, trips, streamed = (30_000, 3_000, 500_000) if options.quick else (100_000, 20_000, 10_000_000)
    peer = await start_process("benchmarks.support.echo_peer", str(folder))
    bus = open_zmq_bus(MEASURER, folder, BusConfig().queue_messages)
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(plain_endpoint(folder))
        pair = ProcessPair(bus, socket, peer)
        await pair.measure_round_trips_us(200)  # warm-up
        rates = [
            (await pair.measure_rate("bus", count), await pair.measure_rate("asyncio", count)) for _ in range(ROUNDS)
        ]
        taken_us = await pair.measure_round_trips_us(trips)
        stream_figures = await pair.stream(streamed)
        await stop_process(peer)
    await bus.close()
    return {
        "ratio_to_pyzmq_asyncio": median(ours / theirs for ours, theirs in rates),
        "messages_per_s": median(ours for ours, _ in rates),
        "pyzmq_asyncio_messages_per_s": median(theirs for _, theirs in rates),
        "round_trip_p50_us": taken_us[len(taken_us) // 2],
        "round_trip_p99_us": taken_us[len(taken_us) * 99 // 100],
        **stream_figures,
    }


async def measure_many_peers(folder: Path, peers: int, rounds: int) -> dict[str, float]:
    """Measure rounds in which every peer receives a message and returns it."""
    share = peers // PEER_PROCESSES
    crowds = [
        await start_process("benchmarks.support.echo_peer", str(folder), str(share * each), str(share))
        for each in range(PEER_PROCESSES)
    ]
    for crowd in crowds:
        assert crowd.stdout is not None
        await crowd.stdout.readline()
    bus = open_zmq_bus(MEASURER, folder, BusConfig().queue_messages)
    names = [format_peer_name(number) for number in range(share * PEER_PROCESSES)]
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
        await stop_process(crowd)
    return {"peers": len(names), "peers_first_round_s": took[0], "peers_round_ms": 1000 * median(took[1:])}


async def start_process(module: str, *arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", module, *arguments, stdin=PIPE, stdout=PIPE)


async def stop_process(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


async def measure(options: Options) -> dict[str, float]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    folder = options.scratch
    return {
        **await measure_pair(folder, options),
        **await measure_many_peers(folder, options.peers, 4 if options.quick else 20),
        "log_events_per_s": measure_log_events_per_s(folder / "log"),
        "story_ms_1m_events": measure_story_ms(folder / "story", options.events),
    }


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        Flag("--peers", 1000),
        Flag("--events", 1_000_000, "number of events in the event log"),
        quick="stream 500,000 messages instead of 10 million",
        shows_table=True,
    )
