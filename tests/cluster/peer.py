"""Runs a process that has only a bus. Lines on its input are commands: peer.py PROCESS SOCKETS WINDOW SPEEDUP

    send TO COUNT BYTES    start sending COUNT frames of that size, alternating between the lanes
    read [COUNT]           start receiving COUNT frames (default: all) and discarding them
    state                  print the counters as one line of JSON

Each frame must arrive once, in the order of its sender and lane. The state has the violations.
SPEEDUP divides the timeouts of heartbeats and handshakes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

from asterism.bus.bus import Bus
from asterism.bus.lanes import select_lane
from asterism.bus.messages import CodeRequested, LeaseReleased
from asterism.bus.transport import curve_auth
from asterism.bus.transport.address_book import load_network
from asterism.bus.transport.zeromq import open_zmq_bus


class Peer:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._tasks = list[asyncio.Task[None]]()
        self._sent = Counter[str]()
        self._max_held = Counter[str]()
        self._received = Counter[str]()
        self._expected = Counter[tuple[str, str]]()
        self._disorder = list[str]()

    def run_command(self, words: list[str]) -> None:
        match words:
            case ["send", to, count, size]:
                self._tasks.append(asyncio.create_task(self._send(to, int(count), "x" * int(size))))
            case ["read", *count]:
                self._tasks.append(asyncio.create_task(self._read(int(count[0]) if count else sys.maxsize)))
            case _:
                self._state()

    async def _send(self, to: str, count: int, text: str) -> None:
        for number in range(count):
            bulk = CodeRequested(number // 2, 0, "jupyter_code", text, "")
            await self._bus.send(to, bulk if number % 2 == 0 else LeaseReleased(number // 2, 5))
            self._sent[to] += 1
            self._max_held[to] = max(self._max_held[to], self._bus.unacknowledged.get(to, 0))

    async def _read(self, count: int) -> None:
        for _ in range(count):
            envelope = await self._bus.receive()
            message = envelope.message
            assert isinstance(message, CodeRequested | LeaseReleased)
            lane = (envelope.sender, select_lane(type(message).__name__))
            if message.trajectory_id != self._expected[lane]:
                self._disorder.append(f"{message.trajectory_id} arrived from {lane}, expected {self._expected[lane]}")
            self._expected[lane] = message.trajectory_id + 1
            self._received[envelope.sender] += 1

    def _state(self) -> None:
        state = {
            **{"sent": self._sent, "received": self._received, "max_held": self._max_held},
            **{"held": dict(self._bus.unacknowledged), "waiting": self._bus.waiting, "dropped": self._bus.dropped},
            **{
                "disorder": self._disorder,
                "failed": [str(task.exception()) for task in self._tasks if task.done() and task.exception()],
            },
        }
        sys.stdout.write(json.dumps(state) + "\n")
        sys.stdout.flush()


async def main(process: str, sockets: Path, window: int, speedup: int) -> None:
    for name in ("_HEARTBEAT_INTERVAL_MS", "_HEARTBEAT_TIMEOUT_MS", "_HANDSHAKE_TIMEOUT_MS"):
        setattr(curve_auth, name, getattr(curve_auth, name) // speedup)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    bus = open_zmq_bus(process, sockets, window, network=load_network(sockets))
    peer = Peer(bus)
    while line := await lines.readline():
        peer.run_command(line.decode().split())
    await bus.close()


asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
