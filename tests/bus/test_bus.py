"""The contract of all transports: in each lane, every message arrives once and in order, and queues are bounded."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from asterism.bus.bus import Bus
from asterism.bus.codec import MalformedFrame
from asterism.bus.messages import AnyMessage, CodeRequested, LeaseReleased, RunFinished, Shutdown, TurnGenerated
from asterism.bus.transport import reliable_transport
from asterism.bus.transport.in_process import Hub, make_in_process_bus_factory
from asterism.bus.transport.zeromq import make_zeromq_bus_factory
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from tests.bus.networks import Join, call, lease_request, receive_numbers, send_calls, wait_until

pytestmark = [pytest.mark.usefixtures("short_waits"), pytest.mark.real_clock, pytest.mark.timeout(60)]


async def test_messages_arrive_once_and_in_order(join: Join) -> None:
    a, b = join("a"), join("b")
    for number in range(500):
        await a.send("b/actor", lease_request(number))
    received = [await b.receive() for _ in range(500)]
    assert [envelope.message for envelope in received] == [lease_request(number) for number in range(500)]
    assert {(envelope.sender, envelope.to) for envelope in received} == {("a", "b/actor")}
    assert b.waiting == 0


async def test_a_message_waits_for_a_receiver_that_joins_later(join: Join) -> None:
    sending = asyncio.create_task(join("a").send("b", LeaseReleased(7, 5)))
    await asyncio.sleep(0)
    assert (await join("b").receive()).message == LeaseReleased(7, 5)
    await sending


async def test_messages_to_the_same_process_bypass_the_transport(join: Join) -> None:
    a = join("a")
    await a.send("a/other", Shutdown())
    assert a.waiting == 1
    assert (await a.receive()).to == "a/other"


@pytest.mark.parametrize("bound", [16])
async def test_a_full_queue_blocks_the_sender_and_drops_no_frame(join: Join) -> None:
    total, frame = 400, bytes(65_536)
    a, b = join("a"), join("b")
    messages = [TurnGenerated(number, 0, 1, frame, b"", b"", "stop") for number in range(total)]
    sending = asyncio.create_task(_send_all(a, messages))
    await b.receive()
    for _ in range(50):  # the sender runs until it blocks
        await asyncio.sleep(0)
    assert not sending.done()
    assert b.waiting <= 16
    assert await receive_numbers(b, total - 1) == list(range(1, total))
    await sending


@pytest.mark.parametrize("bound", [4])
async def test_control_frames_pass_a_full_bulk_lane_and_are_received_first(join: Join) -> None:
    a, b = join("a"), join("b")
    sending = asyncio.create_task(send_calls(a, "b", 20))
    await wait_until(lambda: b.waiting == 4)
    await a.send("b", LeaseReleased(7, 5))
    await wait_until(lambda: b.waiting == 5)
    assert not sending.done()
    received = [(await b.receive()).message for _ in range(21)]
    assert received == [LeaseReleased(7, 5), *(call(number) for number in range(20))]
    await sending


async def test_control_frames_do_not_starve_bulk_frames(join: Join) -> None:
    a = join("a")
    await a.send("a", call(0))
    await _send_all(a, [LeaseReleased(number, 5) for number in range(200)], to="a")
    kinds = [type((await a.receive()).message) for _ in range(100)]
    assert kinds.index(CodeRequested) == 64


async def _send_all(bus: Bus, messages: Sequence[AnyMessage], to: str = "b") -> None:
    for message in messages:
        await bus.send(to, message)


@pytest.mark.parametrize("bound", [4])
async def test_all_senders_that_a_full_receiver_blocks_make_progress(join: Join) -> None:
    senders, each, frame = 8, 40, bytes(65_536)
    a, b = join("a"), join("b")

    async def send(sender: int) -> None:
        for number in range(each):
            await a.send("b", TurnGenerated(sender * each + number, 0, 1, frame, b"", b"", "stop"))

    sending = [asyncio.create_task(send(sender)) for sender in range(senders)]
    assert sorted(await receive_numbers(b, senders * each)) == list(range(senders * each))
    await asyncio.gather(*sending)


@pytest.mark.parametrize("bound", [4, 1000])
async def test_messages_keep_their_order_within_a_lane(join: Join) -> None:
    run_lengths = (1, 200, 2, 63, 1, 64, 3, 65, 1, 1, 7)
    messages: list[AnyMessage] = []
    for index, length in enumerate(run_lengths):
        for _ in range(length):
            number = len(messages)
            messages.append(call(number) if index % 2 else LeaseReleased(number, 5))
    a, b = join("a"), join("b")
    sending = asyncio.create_task(_send_all(a, messages))
    received = [(await b.receive()).message for _ in messages]
    for lane in (CodeRequested, LeaseReleased):
        assert [envelope for envelope in received if type(envelope) is lane] == [
            envelope for envelope in messages if type(envelope) is lane
        ]
    await sending
    assert b.waiting == 0


async def test_messages_sent_before_closing_arrive(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliable_transport, "_CLOSE_TIMEOUT_S", 60.0)  # 0.5 s is too short on a loaded machine
    a, b = join("a"), join("b")
    await send_calls(a, "b", 150)
    await a.close()
    assert [(await b.receive()).message for _ in range(150)] == [call(number) for number in range(150)]


@pytest.mark.parametrize("bound", [8])
async def test_a_cancelled_send_affects_no_other_message(join: Join) -> None:
    a, b = join("a"), join("b")
    senders = [asyncio.create_task(a.send("b", call(number, "#" * 4096))) for number in range(800)]
    for _ in range(20):
        await asyncio.sleep(0)
    for sender in senders[1::2]:
        sender.cancel()
    numbers: list[int] = []

    async def receive_all() -> None:
        while True:
            numbers.extend(await receive_numbers(b, 1))

    receiving = asyncio.create_task(receive_all())
    await asyncio.gather(*senders, return_exceptions=True)
    await a.send("b", call(800))
    await wait_until(lambda: 800 in numbers)
    receiving.cancel()
    sent = [number for number, sender in enumerate(senders) if not sender.cancelled()]
    assert len(sent) < 800
    assert sorted(numbers) == [*sent, 800]


async def test_a_malformed_frame_is_refused_and_the_next_frame_is_received(join: Join) -> None:
    a, b = join("a"), join("b")
    await a.send_frame("b", b"\xc1 nonsense")
    await a.send("b", LeaseReleased(1, 5))
    with pytest.raises(MalformedFrame):
        await b.receive()
    assert (await b.receive()).message == LeaseReleased(1, 5)


async def test_a_second_process_with_the_same_address_is_refused() -> None:
    hub = Hub()
    hub.join("a", 10)
    with pytest.raises(ValueError, match="in use"):
        hub.join("a", 10)


@pytest.mark.parametrize("transport", ["zeromq", "in_process"])
async def test_a_factory_creates_the_bus_of_a_process_by_name_and_epoch(transport: str, tmp_path: Path) -> None:
    run, folder = load_run(Path("configs/tiny.toml")), RunFolder(tmp_path)
    folder.sockets.mkdir()
    in_process = transport == "in_process"
    join = make_in_process_bus_factory(run, Hub()) if in_process else make_zeromq_bus_factory(run, folder)
    head, learner = join("head", 0), join("learner", 7)
    await learner.send("head", RunFinished(3))
    delivery = await head.receive_delivery()
    head.acknowledge(delivery)
    for bus in (learner, head):
        await bus.close()
    shutil.rmtree(folder.sockets)
    assert (delivery.sender, delivery.epoch) == ("learner", 7)
