"""What a process's links put on a wire, and when: parcels, questions and acknowledgements, under a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from structlog.testing import capture_logs

from bus.lanes import BULK, CONTROL, Lane
from bus.links import Limits, Links
from bus.parcels import MAX_FRAME_BYTES, PARCEL_BYTES, Ack, Parcel
from bus.transport import Inbox
from tests.simulation.clock import run_virtually

THEIRS = 7  # session of the peer


class RecordingWire:
    """Keeps what it is given; has no room while `closed`."""

    def __init__(self) -> None:
        self.closed = False
        self.parcels: list[tuple[str, Lane, Parcel]] = []
        self.parted: list[str] = []

    def carry(self, process: str, lane: Lane, parcel: Parcel) -> bool:
        if not self.closed:
            self.parcels.append((process, lane, parcel))
        return not self.closed

    def part(self, process: str) -> None:
        self.parted.append(process)

    async def close(self) -> None:
        pass

    def sizes(self, process: str = "b", lane: Lane = BULK) -> list[int]:
        """In frames; a question has none."""
        return [len(parcel.frames) for to, on, parcel in self.parcels if (to, on) == (process, lane)]


def play(scenario: Callable[[Links, RecordingWire], Coroutine[Any, Any, None]], limits: Limits | None = None) -> None:
    async def run() -> None:
        links = Links("a", 1, Inbox(100), limits or Limits(1000))
        links.wire = wire = RecordingWire()
        await scenario(links, wire)

    run_virtually(run())


async def rounds(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def send(links: Links, count: int, size: int = 1, lane: Lane = BULK, to: str = "b") -> None:
    for _ in range(count):
        await links.send_frame(to, lane, bytes(size))


def answered(
    links: Links, received: int, acknowledged: int, *, asked: int = 0, turn: int = 1, lane: Lane = BULK
) -> None:
    links.hear("b", lane, Ack(1, THEIRS, received, acknowledged, turn, asked))


def arrive(links: Links, first: int, count: int, answers: list[Ack], lane: Lane = BULK) -> None:
    links.arrived(lane, Parcel("b", "a", THEIRS, 1, 0, 0, first, [b"x"] * count), answers.append)


def test_what_is_sent_in_one_turn_of_the_loop_travels_together_and_nothing_waits_for_more() -> None:
    async def scenario(links: Links, wire: RecordingWire) -> None:
        await send(links, 5)
        assert wire.parcels == []
        await rounds()
        assert wire.sizes() == [0]  # who is there?
        answered(links, 0, 0)
        assert wire.sizes() == [0, 5]
        await send(links, 1)
        await send(links, 2, lane=CONTROL)
        await rounds()
        assert wire.sizes() == [0, 5, 1]
        assert wire.sizes(lane=CONTROL) == [0]

    play(scenario)


def test_large_parcels_do_not_wait_for_the_loop_to_come_round() -> None:
    async def scenario(links: Links, wire: RecordingWire) -> None:
        await send(links, 1)
        await rounds()
        answered(links, 0, 0)
        await send(links, 600)
        assert wire.sizes() == [0, 1, 256, 256]
        await rounds()
        assert wire.sizes() == [0, 1, 256, 256, 88]

    play(scenario)


@pytest.mark.parametrize("limits", [Limits(8), Limits(1000, window_bytes=8)])
def test_a_sender_waits_while_the_window_is_full(limits: Limits) -> None:
    async def scenario(links: Links, wire: RecordingWire) -> None:
        sending = asyncio.create_task(send(links, 20))
        other = asyncio.create_task(send(links, 1, lane=CONTROL))
        await rounds()
        answered(links, 0, 0)
        await rounds()
        assert (links.unacknowledged, sending.done(), other.done()) == ({"b": 9}, False, True)
        answered(links, 8, 0)  # received is not acknowledged
        await rounds()
        assert links.unacknowledged == {"b": 9}
        answered(links, 8, 8)
        await rounds(20)
        assert sum(wire.sizes()) == 16
        answered(links, 16, 16)
        await sending
        await rounds()
        assert sum(wire.sizes()) == 20

    play(scenario, limits)


def test_one_frame_may_be_larger_than_the_window() -> None:
    async def scenario(links: Links, wire: RecordingWire) -> None:
        await send(links, 1, size=100)
        waiting = asyncio.create_task(send(links, 1))
        await rounds()
        answered(links, 0, 0)
        assert (wire.sizes(), waiting.done()) == ([0, 1], False)
        answered(links, 1, 1)
        await waiting

    play(scenario, Limits(1000, window_bytes=8))


def test_a_sender_that_is_cancelled_while_it_waits_leaves_no_hole() -> None:
    async def scenario(links: Links, wire: RecordingWire) -> None:
        senders = [asyncio.create_task(send(links, 1)) for _ in range(12)]
        await rounds()
        senders[9].cancel()
        senders[8].cancel()
        answered(links, 0, 0)
        answered(links, 8, 8)
        await asyncio.gather(*senders, return_exceptions=True)
        await rounds()
        numbers = [range(parcel.first, parcel.first + len(parcel.frames)) for _, _, parcel in wire.parcels]
        assert [number for each in numbers for number in each] == list(range(10))

    play(scenario, Limits(8))


def test_while_the_wire_has_no_room_frames_wait_and_keep_their_numbers() -> None:
    async def scenario(links: Links, wire: RecordingWire) -> None:
        await send(links, 1)
        await rounds()
        answered(links, 0, 0)
        wire.closed = True
        await send(links, 300)
        await rounds()
        wire.closed = False
        await send(links, 1)
        await rounds()
        assert wire.sizes() == [0, 1]
        links.carry_on("b", BULK)
        assert [(parcel.first, len(parcel.frames)) for _, _, parcel in wire.parcels[2:]] == [(1, 256), (257, 45)]

    play(scenario)


def test_a_silent_peer_is_asked_less_and_less_often_and_nothing_is_sent_again_unasked() -> None:
    async def scenario(links: Links, wire: RecordingWire) -> None:
        await send(links, 3)
        await rounds()
        answered(links, 0, 0)
        await asyncio.sleep(20)
        questions = len(wire.sizes()) - 2
        assert wire.sizes() == [0, 3] + [0] * questions
        assert 9 <= questions <= 12
        answered(links, 0, 0, asked=3)
        assert wire.sizes()[-1] == 3
        answered(links, 3, 3, turn=2)
        asked = len(wire.parcels)
        await asyncio.sleep(20)
        assert len(wire.parcels) == asked  # nobody is asked who has acknowledged everything

    play(scenario)


def test_acknowledgements_cover_many_frames() -> None:
    async def scenario(links: Links, _wire: RecordingWire) -> None:
        answers: list[Ack] = []
        arrive(links, 0, 0, answers)  # a question
        for number in range(10):
            arrive(links, 5 * number, 5, answers)
        assert len(answers) == 1
        for _ in range(40):
            links.acknowledge(await links.inbox.get())
        await asyncio.sleep(1)
        assert [(ack.received, ack.acknowledged) for ack in answers] == [(0, 0), (50, 40)]
        await asyncio.sleep(1)
        assert len(answers) == 2

    play(scenario)


def test_a_quarter_of_a_window_is_acknowledged_at_once() -> None:
    async def scenario(links: Links, _wire: RecordingWire) -> None:
        answers: list[Ack] = []
        arrive(links, 0, 12, answers)
        for _ in range(10):
            links.acknowledge(await links.inbox.get())
        assert [ack.acknowledged for ack in answers] == [4, 8]

    play(scenario, Limits(16))


def test_a_question_a_gap_and_a_repetition_are_answered_at_once() -> None:
    async def scenario(links: Links, _wire: RecordingWire) -> None:
        answers: list[Ack] = []
        arrive(links, 0, 2, answers)
        arrive(links, 4, 2, answers)
        arrive(links, 0, 2, answers)
        arrive(links, 2, 0, answers)
        assert [(ack.received, ack.asked) for ack in answers] == [(2, 4), (2, 0), (2, 2)]
        assert links.dropped == 2
        assert len(links.inbox) == 2

    play(scenario)


def test_closing_waits_half_a_second_for_peers_that_have_not_received_everything() -> None:
    async def scenario(links: Links, wire: RecordingWire) -> None:
        await send(links, 1)
        closing = asyncio.create_task(links.close())
        await asyncio.sleep(0.4)
        assert not closing.done()
        await asyncio.sleep(0.2)
        assert closing.done()
        with pytest.raises(ConnectionError):
            await send(links, 1)

    play(scenario)


def test_closing_ends_when_everything_is_received() -> None:
    async def scenario(links: Links, wire: RecordingWire) -> None:
        await send(links, 2)
        closing = asyncio.create_task(links.close())
        await rounds()
        answered(links, 0, 0)
        answered(links, 2, 0)
        await asyncio.sleep(0.02)
        assert closing.done()

    play(scenario)


def test_who_waits_for_room_when_the_bus_is_closed_hears_of_it() -> None:
    async def scenario(links: Links, wire: RecordingWire) -> None:
        sending = asyncio.create_task(send(links, 9))
        await rounds()
        await links.close()
        with pytest.raises(ConnectionError):
            await sending

    play(scenario, Limits(8))


def test_a_frame_longer_than_any_receiver_takes_is_refused() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return MAX_FRAME_BYTES + 1

    async def scenario(links: Links, wire: RecordingWire) -> None:
        with pytest.raises(ValueError, match="cannot be sent"):
            await links.send_frame("b", BULK, Long())
        assert links.unacknowledged == {}

    play(scenario)


def test_a_parcel_takes_no_frame_beyond_a_mebibyte() -> None:
    async def scenario(links: Links, wire: RecordingWire) -> None:
        await send(links, 8, size=400_000)
        await rounds()
        answered(links, 0, 0)
        assert wire.sizes() == [0, 3, 3, 2]
        assert PARCEL_BYTES < 3 * 400_000

    play(scenario)


def test_of_more_peers_than_there_may_be_the_first_are_heard_and_the_others_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bus.links.MAX_LINKS", 2)

    async def scenario(links: Links, wire: RecordingWire) -> None:
        answers: list[Ack] = []
        for first in (0, 1):
            for sender in ("b", "c", "d"):
                links.arrived(BULK, Parcel(sender, "a", THEIRS, 1, 0, 0, first, [b"x"]), answers.append)
        heard = [delivery.sender for delivery in iter(links.inbox.take, None)]
        assert heard == ["b", "c", "b", "c"]
        assert links.num_dropped == 2

    play(scenario)


def test_an_answer_from_another_time_is_counted() -> None:
    async def scenario(links: Links, wire: RecordingWire) -> None:
        await send(links, 1)
        await rounds()
        links.hear("b", BULK, Ack(0, THEIRS, 1, 1, 0, 0))
        assert (links.dropped, links.unacknowledged) == (1, {"b": 1})

    play(scenario)


def test_what_was_held_for_who_is_gone_is_dropped_and_counted_and_so_is_what_follows() -> None:
    async def scenario(links: Links, wire: RecordingWire) -> None:
        sending = asyncio.create_task(send(links, 20))
        await rounds()
        answered(links, 0, 0)
        await rounds()
        with capture_logs() as lines:
            links.give_up("b")
            await sending
            await send(links, 1, lane=CONTROL)
            links.give_up("b")
        assert (links.unacknowledged, links.dropped, wire.parted) == ({}, 21, ["b"])
        assert [(line["event"], line["peer"]) for line in lines] == [("frames.dropped", "b")]
        await asyncio.sleep(20)
        assert wire.sizes() == [0, 8]
        assert wire.sizes(lane=CONTROL) == []

    play(scenario, Limits(8))


def test_what_arrives_from_who_is_gone_is_dropped_and_counted_without_an_answer() -> None:
    async def scenario(links: Links, _wire: RecordingWire) -> None:
        answers: list[Ack] = []
        arrive(links, 0, 2, answers)
        with capture_logs() as lines:
            links.give_up("b")
            assert lines == []
            arrive(links, 2, 2, answers)
            arrive(links, 4, 0, answers)
        assert (len(links.inbox), links.dropped, answers) == (2, 2, [])
        assert [line["event"] for line in lines] == ["frames.dropped"]

    play(scenario)
