"""Tests over all transports: a restart of either end of a link neither loses nor duplicates a frame."""

import asyncio

import pytest

from asterism.bus.bus import Bus, Delivery
from asterism.bus.codec import decode
from asterism.bus.lanes import BULK, CONTROL
from asterism.bus.messages import LeaseReleased
from tests.bus.networks import Join, call, lease_request, send_calls, until_acknowledged, wait_until

pytestmark = [pytest.mark.usefixtures("short_waits"), pytest.mark.real_clock, pytest.mark.timeout(60)]


def read_number(delivery: Delivery) -> int:
    return decode(delivery.frame).message.trajectory_id  # pyright: ignore


async def receive_many(bus: Bus, count: int) -> list[Delivery]:
    return [await bus.receive_delivery() for _ in range(count)]


async def test_a_delivery_contains_the_epoch_and_the_number_of_its_frame(join: Join) -> None:
    a, b = join("a", epoch=3), join("b")
    for number in range(2):
        await a.send("b", call(number))
        await a.send("b", lease_request(number))
        await b.send("b", LeaseReleased(number, 5))
    found = {(delivery.sender, delivery.lane, delivery.epoch, delivery.number) for delivery in await receive_many(b, 6)}
    assert found == {
        *(("a", lane, 3, number) for lane in (BULK, CONTROL) for number in range(2)),
        *(("b", CONTROL, 0, number) for number in range(2)),
    }


async def test_a_frame_is_held_until_it_is_acknowledged(join: Join) -> None:
    a, b = join("a"), join("b")
    await send_calls(a, "b", 10)
    deliveries = await receive_many(b, 10)
    assert a.unacknowledged == {"b": 10}
    b.acknowledge(deliveries[6])  # this acknowledges all earlier frames, too
    await wait_until(lambda: a.unacknowledged == {"b": 3})
    b.acknowledge(deliveries[9])
    await until_acknowledged(a)


async def test_a_restored_receiver_gets_only_new_frames(join: Join) -> None:
    """The sender has no acknowledgement of the frames that the receiver has received."""
    a, b = join("a", epoch=4), join("b")
    await send_calls(a, "b", 300)
    received = await receive_many(b, 120)
    await b.close()
    assert a.unacknowledged == {"b": 300}
    b = join("b")
    b.restore({}, {("a", BULK): (4, 120)})
    await a.send("b", call(300))
    received += await receive_many(b, 181)
    assert [read_number(delivery) for delivery in received] == list(range(301))
    b.acknowledge(received[-1])
    await until_acknowledged(a)
    assert b.waiting == 0


async def test_a_restored_sender_resends_without_duplicates(join: Join) -> None:
    """The sender resends frames that are possibly unacknowledged. The receiver drops the duplicates."""
    a, b = join("a"), join("b")
    await send_calls(a, "b", 200)
    received = await receive_many(b, 200)
    frames = [delivery.frame for delivery in received[150:]]
    await a.close()
    a = join("a")
    a.restore({("b", BULK): (203, [*frames, *frames[:3]])}, {})
    await a.send("b", call(203))
    received += await receive_many(b, 4)
    assert [(delivery.epoch, delivery.number) for delivery in received] == [(0, number) for number in range(204)]
    assert b.waiting == 0
    b.acknowledge(received[-1])
    await until_acknowledged(a)


async def test_a_new_incarnation_of_the_sender_starts_at_number_0(join: Join) -> None:
    a, b = join("a", epoch=1), join("b")
    await a.send("b", call(0))
    await receive_many(b, 1)
    await a.close()
    a = join("a", epoch=2)
    await a.send("b", call(1))
    (delivery,) = await receive_many(b, 1)
    assert (read_number(delivery), delivery.epoch, delivery.number) == (1, 2, 0)


async def test_restored_messages_to_the_same_process_are_received_again(join: Join) -> None:
    a = join("a")
    await a.send("a", LeaseReleased(7, 5))
    frame = (await a.receive_delivery()).frame
    await a.close()
    a = join("a")
    a.restore({("a", CONTROL): (4, [frame])}, {})
    await a.send("a", LeaseReleased(8, 5))
    assert [(read_number(delivery), delivery.number) for delivery in await receive_many(a, 2)] == [(7, 3), (8, 4)]


async def test_a_restore_after_a_send_is_refused(join: Join) -> None:
    a = join("a")
    await a.send("b", call(0))
    with pytest.raises(RuntimeError, match="before any frame is sent"):
        a.restore({}, {("b", BULK): (1, 5)})


@pytest.mark.parametrize("bound", [8])
@pytest.mark.slow
async def test_dropping_unacknowledged_frames_releases_blocked_senders(join: Join) -> None:
    a = join("a")
    sending = [asyncio.create_task(a.send("b", call(number))) for number in range(10)]
    await asyncio.sleep(0.01)
    assert not sending[9].done()
    a.drop_unacknowledged("b")
    await asyncio.gather(*sending)
    assert a.unacknowledged == {"b": 2}
    (first, second) = await receive_many(join("b"), 2)
    assert [(read_number(delivery), delivery.number) for delivery in (first, second)] == [(8, 8), (9, 9)]
