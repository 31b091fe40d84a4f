"""`python -m benchmarks._bus_peer FOLDER`: the other process of benchmarks.bus.

It sends back what it receives on the bus. Told by a line on its input, `bus N` or `asyncio N`, it sends N messages that
way; `memory` makes it print its resident MiB. Ends with its input.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import uvloop
import zmq
import zmq.asyncio

from benchmarks._memory import resident_mib
from bus.codec import encode
from bus.messages import Envelope, StartGroup
from bus.transport import Bus
from bus.zeromq import zmq_bus
from configs.schema import Bus as BusConfig

PEER, MEASURER = "peer", "measurer"
MESSAGE = StartGroup(  # 64 ids and 200 characters
    group_id=7,
    purpose="train",
    problem="p" * 198,
    ground_truth="42",
    prompt_ids=bytes(range(256)),
    size=32,
    first_trajectory_id=70_000,
    temperature=1.0,
    seed=5,
)


def plain_endpoint(folder: Path) -> str:
    return f"ipc://{folder / 'plain'}"


async def send_back(bus: Bus) -> None:
    while True:
        envelope = await bus.receive()
        await bus.send(envelope.sender, envelope.message)


async def obey(bus: Bus, socket: zmq.asyncio.Socket) -> None:
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := (await lines.readline()).decode().split():
        if line[0] == "memory":
            print(resident_mib(os.getpid()), flush=True)
            continue
        for _ in range(int(line[1])):
            if line[0] == "bus":
                await bus.send(MEASURER, MESSAGE)
            else:
                await socket.send(encode(Envelope(PEER, MEASURER, MESSAGE)))


async def live(folder: Path) -> None:
    bus = zmq_bus(PEER, folder, BusConfig().queue_messages)
    with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(plain_endpoint(folder))
        echoing = asyncio.create_task(send_back(bus))
        await obey(bus, socket)
        echoing.cancel()
    await bus.close()


if __name__ == "__main__":
    uvloop.run(live(Path(sys.argv[1])))
