"""A process on a host that has nothing but a bus, and does what it is told by lines. peer.py PROCESS SOCKETS WINDOW

    send TO COUNT BYTES    begins to send so many frames of that size, by both lanes in turn
    read [COUNT]           begins to take what comes, so many frames of it, and forgets it
    state                  prints one line: what it has sent and received so far, as JSON

What it takes must come once and in the order in which it was sent, by each sender and lane; it says what did not.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

from bus.book import network_of
from bus.lanes import lane_of
from bus.messages import CodeRequested, LeaseReleased
from bus.transport import Bus
from bus.zeromq import zmq_bus


class Peer:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._tasks = list[asyncio.Task[None]]()
        self._sent = Counter[str]()
        self._most_held = Counter[str]()
        self._received = Counter[str]()
        self._expected = Counter[tuple[str, str]]()
        self._disorder = list[str]()

    def obey(self, words: list[str]) -> None:
        match words:
            case ["send", to, count, size]:
                self._tasks.append(asyncio.create_task(self._send(to, int(count), "x" * int(size))))
            case ["read", *most]:
                self._tasks.append(asyncio.create_task(self._read(int(most[0]) if most else sys.maxsize)))
            case _:
                self._state()

    async def _send(self, to: str, count: int, text: str) -> None:
        for number in range(count):
            bulk = CodeRequested(number // 2, 0, "jupyter_code", text, "")
            await self._bus.send(to, bulk if number % 2 == 0 else LeaseReleased(number // 2, 5))
            self._sent[to] += 1
            self._most_held[to] = max(self._most_held[to], self._bus.unacknowledged.get(to, 0))

    async def _read(self, most: int) -> None:
        for _ in range(most):
            envelope = await self._bus.receive()
            message = envelope.message
            assert isinstance(message, CodeRequested | LeaseReleased)
            way = (envelope.sender, lane_of(type(message).__name__))
            if message.trajectory_id != self._expected[way]:
                self._disorder.append(f"{message.trajectory_id} came by {way}, not {self._expected[way]}")
            self._expected[way] = message.trajectory_id + 1
            self._received[envelope.sender] += 1

    def _state(self) -> None:
        state = {
            **{"sent": self._sent, "received": self._received, "most_held": self._most_held},
            **{"held": dict(self._bus.unacknowledged), "waiting": self._bus.waiting, "dropped": self._bus.dropped},
            **{
                "disorder": self._disorder,
                "failed": [str(task.exception()) for task in self._tasks if task.done() and task.exception()],
            },
        }
        sys.stdout.write(json.dumps(state) + "\n")
        sys.stdout.flush()


async def main(process: str, sockets: Path, window: int) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    bus = zmq_bus(process, sockets, window, network=network_of(sockets))
    peer = Peer(bus)
    while line := await lines.readline():
        peer.obey(line.decode().split())
    await bus.close()


asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
