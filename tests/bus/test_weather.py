"""Two processes over a wire in any weather, which die and come back: everything arrives once, in order, and is let go."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from bus.codec import decode, encode
from bus.lanes import BULK, CONTROL, Lane
from bus.messages import Envelope, LeaseReleased
from bus.transport import Bus
from tests.bus.networks import call
from tests.bus.weather import Sky, Weather
from tests.simulation.clock import run_virtually

FRAMES = 400  # in each lane
FOUL = Weather(lost=0.1, repeated=0.1, overtaken=0.2, full=0.1)
Taken = dict[Lane, list[int]]


class Receiver:
    """Reads and acknowledges; its lives either remember what they acknowledged, or have a session of their own each."""

    def __init__(self, sky: Sky, *, remembers: bool) -> None:
        self.sky = sky
        self.remembers = remembers
        self.taken: Taken = defaultdict(list)
        self.num_lives = 0
        self.bus: Bus
        self.life: asyncio.Task[None]

    def live(self) -> None:
        self.num_lives += 1
        self.bus = self.sky.join("b", 64, 0 if self.remembers else self.num_lives)
        if self.remembers:
            self.bus.restore({}, {("a", lane): (0, len(taken)) for lane, taken in self.taken.items()})
        self.life = asyncio.create_task(self._read())

    async def die(self) -> None:
        self.life.cancel()
        await asyncio.wait([self.life])
        self.sky.leave("b")

    async def _read(self) -> None:
        while True:
            delivery = await self.bus.receive_delivery()
            number = decode(delivery.frame).message.trajectory_id  # pyright: ignore
            assert delivery.number == number
            self.taken[delivery.lane].append(number)
            self.bus.acknowledge(delivery)
            if self.sky.random.random() < 0.1:
                await asyncio.sleep(self.sky.random.expovariate(20))


async def send_all(bus: Bus, sky: Sky) -> None:
    for number in range(FRAMES):
        await bus.send("b", call(number))
        await bus.send("b", LeaseReleased(number, 5))
        if sky.random.random() < 0.1:
            await asyncio.sleep(sky.random.expovariate(20))


async def until_let_go(bus: Bus) -> None:
    while bus.unacknowledged:  # noqa: ASYNC110 - under a virtual clock
        await asyncio.sleep(0.1)


def seeds(count: int) -> list[Any]:
    return [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, count))]


@pytest.mark.parametrize("seed", seeds(20))
def test_in_any_weather_everything_arrives_once_and_in_order(seed: int) -> None:
    async def scenario() -> None:
        sky = Sky(seed, FOUL)
        a, receiver = sky.join("a", 64), Receiver(sky, remembers=True)
        receiver.live()
        sending = asyncio.create_task(send_all(a, sky))
        for _ in range(sky.random.randrange(4)):  # the wire is cut, and heals
            await asyncio.sleep(sky.random.expovariate(1))
            sky.broken = True
            await asyncio.sleep(sky.random.expovariate(1))
            sky.broken = False
        await sending
        await until_let_go(a)
        assert receiver.taken == {lane: list(range(FRAMES)) for lane in (BULK, CONTROL)}
        assert receiver.bus.waiting == 0
        receiver.life.cancel()

    run_virtually(asyncio.wait_for(scenario(), 3600))


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("seed", seeds(10))
def test_a_receiver_may_die_at_any_time(seed: int, remembers: bool) -> None:
    """One that remembers gets all the rest; without memory, what was acknowledged in vain comes again, and nothing
    else."""

    async def scenario() -> None:
        sky = Sky(seed, FOUL)
        a, receiver = sky.join("a", 64), Receiver(sky, remembers=remembers)
        receiver.live()
        sending = asyncio.create_task(send_all(a, sky))
        for _ in range(5):
            await asyncio.sleep(sky.random.expovariate(1))
            await receiver.die()
            await asyncio.sleep(sky.random.expovariate(1))
            receiver.live()
        await sending
        await until_let_go(a)
        for lane in (BULK, CONTROL):
            taken = receiver.taken[lane]
            assert list(dict.fromkeys(taken)) == list(range(FRAMES))
            assert len(taken) == FRAMES or not remembers
            assert len(taken) <= FRAMES + 64 * receiver.num_lives
        receiver.life.cancel()

    run_virtually(asyncio.wait_for(scenario(), 3600))


@pytest.mark.parametrize("seed", seeds(10))
def test_a_sender_that_remembers_may_die_at_any_time(seed: int) -> None:
    async def scenario() -> None:
        sky = Sky(seed, FOUL)
        receiver, frames = Receiver(sky, remembers=True), [call(number) for number in range(FRAMES)]
        receiver.live()
        a, sent = sky.join("a", 10_000), list[bytes]()
        while len(sent) < FRAMES:
            for message in frames[len(sent) : len(sent) + sky.random.randrange(120)]:
                await a.send("b", message)
                sent.append(encode(Envelope("a", "b", message)))
            await asyncio.sleep(sky.random.expovariate(1))
            held = a.unacknowledged.get("b", 0)
            sky.leave("a")
            a = sky.join("a", 10_000)
            a.restore({("b", BULK): (len(sent), sent[len(sent) - held :])}, {})
        await until_let_go(a)
        assert receiver.taken[BULK] == list(range(FRAMES))
        receiver.life.cancel()

    run_virtually(asyncio.wait_for(scenario(), 3600))
