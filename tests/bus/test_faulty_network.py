"""Tests: two processes restart on a faulty network, and each frame arrives once, in order, and is acknowledged."""

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from asterism.bus.bus import Bus
from asterism.bus.codec import decode
from asterism.bus.lanes import BULK, CONTROL, Lane
from asterism.bus.messages import LeaseReleased
from tests.bus.faulty_network import FaultRates, FaultyNetwork
from tests.bus.networks import call

FRAMES = 400  # number of frames in each lane
FAULTS = FaultRates(lost=0.1, duplicated=0.1, delayed=0.2, full=0.1)
Received = dict[Lane, list[int]]


class Receiver:
    """A receiver that acknowledges frames. Each incarnation restores the state, or starts with a new epoch."""

    def __init__(self, faulty_network: FaultyNetwork, *, is_restored: bool) -> None:
        self.faulty_network = faulty_network
        self.is_restored = is_restored
        self.received: Received = defaultdict(list)
        self.num_incarnations = 0
        self.bus: Bus
        self.task: asyncio.Task[None]

    def start(self) -> None:
        self.num_incarnations += 1
        self.bus = self.faulty_network.join("b", 64, 0 if self.is_restored else self.num_incarnations)
        if self.is_restored:
            self.bus.restore({}, {("a", lane): (0, len(received)) for lane, received in self.received.items()})
        self.task = asyncio.create_task(self._read())

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        self.faulty_network.kill("b")

    async def _read(self) -> None:
        while True:
            delivery = await self.bus.receive_delivery()
            number = decode(delivery.frame).message.trajectory_id  # pyright: ignore
            assert delivery.number == number
            self.received[delivery.lane].append(number)
            self.bus.acknowledge(delivery)
            if self.faulty_network.random.random() < 0.1:
                await asyncio.sleep(self.faulty_network.random.expovariate(20))


async def send_all(bus: Bus, faulty_network: FaultyNetwork) -> None:
    for number in range(FRAMES):
        await bus.send("b", call(number))
        await bus.send("b", LeaseReleased(number, 5))
        if faulty_network.random.random() < 0.1:
            await asyncio.sleep(faulty_network.random.expovariate(20))


async def until_acknowledged(bus: Bus) -> None:
    while bus.unacknowledged:  # noqa: ASYNC110 - under a virtual clock
        await asyncio.sleep(0.1)


def seeds(count: int) -> list[Any]:
    return [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, count))]


@pytest.mark.parametrize("seed", seeds(20))
async def test_frames_arrive_once_and_in_order_over_a_faulty_network(seed: int) -> None:
    faulty_network = FaultyNetwork(seed, FAULTS)
    a, receiver = faulty_network.join("a", 64), Receiver(faulty_network, is_restored=True)
    receiver.start()
    sending = asyncio.create_task(send_all(a, faulty_network))
    for _ in range(faulty_network.random.randrange(4)):  # intervals without a working network
        await asyncio.sleep(faulty_network.random.expovariate(1))
        faulty_network.broken = True
        await asyncio.sleep(faulty_network.random.expovariate(1))
        faulty_network.broken = False
    await sending
    await until_acknowledged(a)
    assert receiver.received == {lane: list(range(FRAMES)) for lane in (BULK, CONTROL)}
    assert receiver.bus.waiting == 0
    receiver.task.cancel()


@pytest.mark.parametrize("is_restored", [True, False])
@pytest.mark.parametrize("seed", seeds(10))
async def test_a_receiver_can_be_killed_at_any_time(seed: int, is_restored: bool) -> None:
    """A restored receiver gets each frame once. A new epoch also gets frames whose acknowledgement was lost."""
    faulty_network = FaultyNetwork(seed, FAULTS)
    a, receiver = faulty_network.join("a", 64), Receiver(faulty_network, is_restored=is_restored)
    receiver.start()
    sending = asyncio.create_task(send_all(a, faulty_network))
    for _ in range(5):
        await asyncio.sleep(faulty_network.random.expovariate(1))
        await receiver.kill()
        await asyncio.sleep(faulty_network.random.expovariate(1))
        receiver.start()
    await sending
    await until_acknowledged(a)
    for lane in (BULK, CONTROL):
        received = receiver.received[lane]
        assert list(dict.fromkeys(received)) == list(range(FRAMES))
        assert len(received) == FRAMES or not is_restored
        assert len(received) <= FRAMES + 64 * receiver.num_incarnations
    receiver.task.cancel()
