"""Relays frames between two taps with delay and a limited rate: relay.py TAP TAP DELAY_MS MBIT_PER_S

Frames wait in a bounded queue, as in a router. A full queue drops frames, and TCP retransmits them. Unlike the end of a
veth pair, a tap delivers frames as a wire does: with checksums, and not longer than the MTU.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_LONGEST_FRAME = 2048
_QUEUE_BYTES = 256 << 10


class Direction:
    def __init__(self, source: int, target: int, delay_s: float, bytes_per_s: float) -> None:
        self.source, self._target = source, target
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s
        self._free_at = 0.0  # time at which the wire has sent all queued frames
        self._in_flight: deque[tuple[float, bytes]] = deque()  # (arrival time, frame)

    def receive(self, now: float) -> None:
        while True:
            try:
                frame = os.read(self.source, _LONGEST_FRAME)
            except BlockingIOError:
                return
            begins = max(now, self._free_at)
            if (begins - now) * self._bytes_per_s < _QUEUE_BYTES:
                self._free_at = begins + len(frame) / self._bytes_per_s
                self._in_flight.append((self._free_at + self._delay_s, frame))

    def deliver(self, now: float) -> float:
        """Write the frames that are due. Return the arrival time of the next frame, or infinity."""
        while self._in_flight and self._in_flight[0][0] <= now:
            os.write(self._target, self._in_flight.popleft()[1])
        return self._in_flight[0][0] if self._in_flight else float("inf")


def open_tap(name: str) -> int:
    """Open a tap that exists until this process ends."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


def relay(directions: list[Direction]) -> None:
    sources = [direction.source for direction in directions]
    while True:
        due = min(direction.deliver(time.monotonic()) for direction in directions)
        wait_s = None if due == float("inf") else max(0.0, due - time.monotonic())
        readable, _, _ = select.select(sources, [], [], wait_s)
        for direction in directions:
            if direction.source in readable:
                direction.receive(time.monotonic())


def main() -> None:
    first, second = open_tap(sys.argv[1]), open_tap(sys.argv[2])
    delay_s, bytes_per_s = float(sys.argv[3]) / 1e3, float(sys.argv[4]) * 1e6 / 8
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    relay([Direction(first, second, delay_s, bytes_per_s), Direction(second, first, delay_s, bytes_per_s)])


main()
