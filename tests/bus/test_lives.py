"""What becomes of a link when either end of it dies and comes back, over all transports: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from bus.codec import decode
from bus.lanes import BULK, CONTROL
from bus.messages import LeaseReleased
from bus.transport import Bus, Delivery
from tests.bus.networks import IN_TESTS, call, lease_request, network, until

pytestmark = pytest.mark.usefixtures("short_waits")


@pytest.fixture(params=IN_TESTS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, timeout=60))


def number_of(delivery: Delivery) -> int:
    return decode(delivery.frame).message.trajectory_id  # pyright: ignore


async def take(bus: Bus, count: int) -> list[Delivery]:
    return [await bus.receive_delivery() for _ in range(count)]


async def until_acknowledged(bus: Bus) -> None:
    await until(lambda: not bus.unacknowledged)


def test_a_delivery_says_which_frame_of_which_life_it_is(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            a, b = join("a", session=3), join("b")
            for number in range(2):
                await a.send("b", call(number))
                await a.send("b", lease_request(number))
                await b.send("b", LeaseReleased(number, 5))
            found = {(one.sender, one.lane, one.session, one.number) for one in await take(b, 6)}
            assert found == {
                *(("a", lane, 3, number) for lane in (BULK, CONTROL) for number in range(2)),
                *(("b", CONTROL, 0, number) for number in range(2)),
            }

    run(scenario())


def test_a_frame_is_held_until_it_is_acknowledged(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            a, b = join("a"), join("b")
            for number in range(10):
                await a.send("b", call(number))
            deliveries = await take(b, 10)
            assert a.unacknowledged == {"b": 10}
            b.acknowledge(deliveries[6])  # and what came before it
            await until(lambda: a.unacknowledged == {"b": 3})
            b.acknowledge(deliveries[9])
            await until_acknowledged(a)

    run(scenario())


@pytest.mark.slow
def test_a_new_life_gets_what_the_old_one_did_not_acknowledge(kind: str, tmp_path: Path) -> None:
    """Hundreds of frames are under way, in both lanes, and the sender goes on while nobody is there."""

    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            a, b = join("a"), join("b", session=1)
            for number in range(300):
                await a.send("b", call(number))
                await a.send("b", lease_request(number))
            taken = await take(b, 100)
            for delivery in taken:
                b.acknowledge(delivery)
            await until(lambda: a.unacknowledged == {"b": 500})
            await b.close()
            for number in range(300, 400):
                await a.send("b", call(number))
            b = join("b", session=2)
            received = [*taken, *await take(b, 600)]
            for lane, count in ((BULK, 400), (CONTROL, 300)):
                assert [number_of(one) for one in received if one.lane == lane] == list(range(count))
                b.acknowledge([one for one in received if one.lane == lane][-1])
            await until_acknowledged(a)
            assert b.waiting == 0
            assert b.dropped == 0

    run(scenario())


def test_a_receiver_that_remembers_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    """What it has acknowledged last may be unknown to the sender."""

    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            a, b = join("a", session=4), join("b")
            for number in range(300):
                await a.send("b", call(number))
            kept = await take(b, 120)
            await b.close()
            assert a.unacknowledged == {"b": 300}
            b = join("b")
            b.restore({}, {("a", BULK): (4, 120)})
            await a.send("b", call(300))
            kept += await take(b, 181)
            assert [number_of(one) for one in kept] == list(range(301))
            b.acknowledge(kept[-1])
            await until_acknowledged(a)
            assert b.waiting == 0

    run(scenario())


def test_a_sender_that_remembers_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    """It sends again what may not have been acknowledged, and the receiver knows what of it has come."""

    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            a, b = join("a"), join("b")
            for number in range(200):
                await a.send("b", call(number))
            kept = await take(b, 200)
            frames = [delivery.frame for delivery in kept[150:]]
            await a.close()
            a = join("a")
            a.restore({("b", BULK): (203, [*frames, *frames[:3]])}, {})
            await a.send("b", call(203))
            kept += await take(b, 4)
            assert [(one.session, one.number) for one in kept] == [(0, number) for number in range(204)]
            assert b.waiting == 0
            b.acknowledge(kept[-1])
            await until_acknowledged(a)

    run(scenario())


def test_a_new_life_of_the_sender_begins_anew(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            a, b = join("a", session=1), join("b")
            await a.send("b", call(0))
            await take(b, 1)
            await a.close()
            a = join("a", session=2)
            await a.send("b", call(1))
            (delivery,) = await take(b, 1)
            assert (number_of(delivery), delivery.session, delivery.number) == (1, 2, 0)

    run(scenario())


def test_what_a_process_sent_to_itself_is_received_again(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            a = join("a")
            await a.send("a", LeaseReleased(7, 5))
            frame = (await a.receive_delivery()).frame
            await a.close()
            a = join("a")
            a.restore({("a", CONTROL): (4, [frame])}, {})
            await a.send("a", LeaseReleased(8, 5))
            assert [(number_of(one), one.number) for one in await take(a, 2)] == [(7, 3), (8, 4)]

    run(scenario())


def test_links_are_restored_before_anything_is_sent(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            a = join("a")
            await a.send("b", call(0))
            with pytest.raises(RuntimeError, match="before anything is sent"):
                a.restore({}, {("b", BULK): (1, 5)})

    run(scenario())


@pytest.mark.slow
def test_what_is_forgotten_is_not_sent_and_lets_those_who_wait_go_on(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with network(kind, tmp_path, bound=8) as join:
            a = join("a")
            sending = [asyncio.create_task(a.send("b", call(number))) for number in range(10)]
            await asyncio.sleep(0.01)
            assert not sending[9].done()
            a.forget("b")
            await asyncio.gather(*sending)
            assert a.unacknowledged == {"b": 2}
            (first, second) = await take(join("b"), 2)
            assert [(number_of(one), one.number) for one in (first, second)] == [(8, 8), (9, 9)]

    run(scenario())
