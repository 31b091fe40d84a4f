"""`python -m benchmarks.support.echo_peer FOLDER [FIRST COUNT]`: the second process of benchmarks.bus.

The process echoes each bus message. An input line `bus N` or `asyncio N` makes it send N messages
over that transport; `memory` makes it print its resident MiB. With FIRST and COUNT the
process has COUNT echo peers, each with its own bus, and takes no commands. It exits at the end of its
input.
"""

import asyncio
import os
import sys
from pathlib import Path

import uvloop
import zmq
import zmq.asyncio

from asterism.bus.bus import Bus
from asterism.bus.codec import encode
from asterism.bus.messages import Envelope, StartGroup
from asterism.bus.transport.zeromq import open_zmq_bus
from asterism.configs.schema.algorithm import Sampling
from asterism.configs.schema.machines import BusConfig as BusConfig
from benchmarks.support.process_usage import read_resident_mib

PEER, MEASURER = "peer", "measurer"
QUEUE_MESSAGES = 1000  # queue length of each peer
MESSAGE = StartGroup(  # 64 token ids and 200 characters of text
    group_id=7,
    purpose="train",
    problem="p" * 198,
    ground_truth="42",
    prompt_ids=bytes(range(256)),
    size=32,
    first_trajectory_id=70_000,
    sampling=Sampling(),
    seed=5,
)


def plain_endpoint(folder: Path) -> str:
    return f"ipc://{folder / 'plain'}"


async def echo(bus: Bus) -> None:
    while True:
        envelope = await bus.receive()
        await bus.send(envelope.sender, envelope.message)


async def serve_commands(bus: Bus, socket: zmq.asyncio.Socket) -> None:
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := (await lines.readline()).decode().split():
        if line[0] == "memory":
            print(read_resident_mib(os.getpid()), flush=True)
            continue
        for _ in range(int(line[1])):
            if line[0] == "bus":
                await bus.send(MEASURER, MESSAGE)
            else:
                await socket.send(encode(Envelope(PEER, MEASURER, MESSAGE)))


async def run_peer(folder: Path) -> None:
    bus = open_zmq_bus(PEER, folder, BusConfig().queue_messages)
    with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(plain_endpoint(folder))
        echoing = asyncio.create_task(echo(bus))
        await serve_commands(bus, socket)
        echoing.cancel()
    await bus.close()


def format_peer_name(number: int) -> str:
    return f"peer-{number}"


async def run_peers(folder: Path, first: int, count: int) -> None:
    buses: list[Bus] = [
        open_zmq_bus(format_peer_name(number), folder, QUEUE_MESSAGES) for number in range(first, first + count)
    ]
    tasks = [asyncio.create_task(echo(bus)) for bus in buses]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*(bus.close() for bus in buses))


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    uvloop.run(run_peers(Path(folder), *map(int, numbers)) if numbers else run_peer(Path(folder)))
