"""`python -m benchmarks._bus_crowd FOLDER FIRST COUNT`: so many processes' worth of peers, each with a bus of its own.

Each sends back what it receives, until its input ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from benchmarks._bus_peer import send_back
from bus.transport import Bus
from bus.zeromq import zmq_bus

QUEUE_MESSAGES = 1000


def name_of(number: int) -> str:
    return f"peer-{number}"


async def live(folder: Path, first: int, count: int) -> None:
    buses: list[Bus] = [zmq_bus(name_of(number), folder, QUEUE_MESSAGES) for number in range(first, first + count)]
    tasks = [asyncio.create_task(send_back(bus)) for bus in buses]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*(bus.close() for bus in buses))


if __name__ == "__main__":
    uvloop.run(live(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
