"""A wire for bus.links under a virtual clock, by seed: it delays, overtakes, repeats, and breaks with what is in it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

import msgspec

from bus.lanes import Lane
from bus.links import Limits, Links
from bus.parcels import Ack, Parcel, decode_ack, decode_parcel, encode_ack, encode_parcel
from bus.transport import Bus, Inbox


class Weather(msgspec.Struct, frozen=True):
    """Shares of all parcels and answers."""

    lost: float = 0.0
    repeated: float = 0.0
    overtaken: float = 0.0
    full: float = 0.0  # parcels for which there is no room at first


class Sky:
    """Where the members find each other, whatever life they are in."""

    def __init__(self, seed: int, weather: Weather) -> None:
        self.random = random.Random(seed)
        self.weather = weather
        self.members: dict[str, Links] = {}
        self.broken = False  # nothing arrives

    def join(self, process: str, queue_messages: int, session: int = 0) -> Bus:
        inbox = Inbox(queue_messages)
        links = Links(process, session, inbox, Limits(queue_messages))
        links.wire = WeatherWire(self, links)
        self.members[process] = links
        return Bus(process, inbox, links)

    def leave(self, process: str) -> None:
        """As one does who is killed."""
        del self.members[process]

    def travel(self, arrive: Callable[[], object]) -> None:
        loop, draw, weather = asyncio.get_running_loop(), self.random.random, self.weather
        for _ in range(2 if draw() < weather.repeated else 1):
            if draw() >= weather.lost:
                after_s = 0.001 + (self.random.expovariate(5) if draw() < weather.overtaken else 0.0)
                loop.call_later(after_s, self._arrive, arrive)

    def _arrive(self, arrive: Callable[[], object]) -> None:
        if not self.broken:
            arrive()


class WeatherWire:
    """Implements bus.links.Wire. A full inbox is as a broken wire: what comes is lost."""

    def __init__(self, sky: Sky, links: Links) -> None:
        self._sky = sky
        self._links = links

    def carry(self, process: str, lane: Lane, parcel: Parcel) -> bool:
        if self._sky.random.random() < self._sky.weather.full:
            asyncio.get_running_loop().call_later(0.01, self._links.carry_on, process, lane)
            return False
        self._sky.travel(partial(self._deliver, process, lane, encode_parcel(parcel)))
        return True

    def _deliver(self, process: str, lane: Lane, data: bytes) -> None:
        member = self._sky.members.get(process)
        if member is not None and not member.inbox.full(lane):
            member.arrived(lane, decode_parcel(data), partial(self._answer, process, lane))

    def _answer(self, process: str, lane: Lane, ack: Ack) -> None:
        self._sky.travel(partial(self._hear, process, lane, encode_ack(ack)))

    def _hear(self, process: str, lane: Lane, data: bytes) -> None:
        if self._sky.members.get(self._links.process) is self._links:
            self._links.hear(process, lane, decode_ack(data))

    def part(self, process: str) -> None:
        pass

    async def close(self) -> None:
        pass
