"""A slow wire: frames between two taps, each way with so much delay at such a rate. relay.py TAP TAP DELAY_MS MBIT_PER_S

What waits for its turn on the wire waits in a queue as a router has one; what finds it full is dropped, and TCP sends it
again. A tap, unlike the end of a veth pair, hands over frames as they would be on a wire: none longer than one, each with
its checksum.
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
        self._free_at = 0.0  # when all that was let in has been put on the wire
        self._under_way: deque[tuple[float, bytes]] = deque()  # and when it arrives

    def take(self, now: float) -> None:
        while True:
            try:
                frame = os.read(self.source, _LONGEST_FRAME)
            except BlockingIOError:
                return
            begins = max(now, self._free_at)
            if (begins - now) * self._bytes_per_s < _QUEUE_BYTES:
                self._free_at = begins + len(frame) / self._bytes_per_s
                self._under_way.append((self._free_at + self._delay_s, frame))

    def deliver(self, now: float) -> float:
        """What is due. When there is more to do, or infinity."""
        while self._under_way and self._under_way[0][0] <= now:
            os.write(self._target, self._under_way.popleft()[1])
        return self._under_way[0][0] if self._under_way else float("inf")


def tap(name: str) -> int:
    """It is there as long as this process is."""
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
                direction.take(time.monotonic())


def main() -> None:
    one, other = tap(sys.argv[1]), tap(sys.argv[2])
    delay_s, bytes_per_s = float(sys.argv[3]) / 1e3, float(sys.argv[4]) * 1e6 / 8
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    relay([Direction(one, other, delay_s, bytes_per_s), Direction(other, one, delay_s, bytes_per_s)])


main()
