"""`python -m benchmarks.support.echo_peers FOLDER FIRST COUNT`: COUNT echo peers in one process.

Each peer has its own bus and echoes each message. The process exits at the end of its input.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from benchmarks.support.echo_peer import echo
from bus.bus import Bus
from bus.transport.zeromq import open_zmq_bus

QUEUE_MESSAGES = 1000


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
    uvloop.run(run_peers(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
