"""The two machines of a link's lane, over a wire that loses, repeats and reorders, while either side dies and comes back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bus.link import Incoming, Outgoing
from bus.parcels import PARCEL_BYTES, PARCEL_FRAMES, Ack, Parcel


def frame_of(number: int) -> bytes:
    """Of a length of its own."""
    return number.to_bytes(4 + number % 3, "big")


def sender(session: int = 1, frames: int = 0) -> Outgoing:
    outgoing = Outgoing("a", session, "b")
    for number in range(frames):
        outgoing.add(frame_of(number))
    return outgoing


def introduce(outgoing: Outgoing, incoming: Incoming) -> None:
    question = outgoing.parcel()
    assert question is not None
    assert question.frames == []
    assert incoming.take(question) == []
    assert outgoing.hear(incoming.ack())


def test_frames_travel_to_a_receiver_that_is_known() -> None:
    outgoing, incoming = sender(frames=3), Incoming(own_session=5)
    introduce(outgoing, incoming)
    parcel = outgoing.parcel()
    assert parcel == Parcel("a", "b", 1, 5, 1, 0, 0, [frame_of(number) for number in range(3)])
    assert incoming.take(parcel) == parcel.frames
    assert outgoing.parcel() is None
    assert not incoming.answer_due


def test_before_the_receiver_is_known_it_is_asked_once() -> None:
    outgoing = sender(frames=1)
    assert outgoing.parcel() == outgoing.question()
    assert outgoing.parcel() is None


def test_a_parcel_is_bounded_in_frames_and_bytes() -> None:
    outgoing, incoming = sender(frames=PARCEL_FRAMES + 1), Incoming(0)
    introduce(outgoing, incoming)
    assert [len(parcel.frames) for parcel in (outgoing.parcel(), outgoing.parcel()) if parcel] == [PARCEL_FRAMES, 1]
    for _ in range(3):
        outgoing.add(bytes(PARCEL_BYTES - 1))
    assert [len(parcel.frames) for parcel in (outgoing.parcel(), outgoing.parcel()) if parcel] == [2, 1]


def test_what_is_acknowledged_is_dropped_and_what_is_received_is_held() -> None:
    outgoing, incoming = sender(frames=4), Incoming(0)
    introduce(outgoing, incoming)
    incoming.take(outgoing.parcel())  # pyright: ignore[reportArgumentType]
    outgoing.add(frame_of(4))
    assert incoming.acknowledge(1, 1)
    assert outgoing.hear(incoming.ack())
    assert (outgoing.base, outgoing.received, outgoing.held, outgoing.num_bytes) == (2, 4, 3, 6 + 4 + 5)
    assert outgoing.parcel() == Parcel("a", "b", 1, 0, 1, 2, 4, [frame_of(4)])
    assert not incoming.acknowledge(1, 0)
    assert not incoming.acknowledge(1, 4)
    assert not incoming.acknowledge(0, 2)


def test_a_missing_parcel_is_asked_for_again_once_and_what_is_slow_is_not_sent_again() -> None:
    outgoing, incoming = sender(frames=1), Incoming(0)
    introduce(outgoing, incoming)
    lost = outgoing.parcel()
    assert lost is not None
    for number in (1, 2):
        outgoing.add(frame_of(number))
        later = outgoing.parcel()
        assert later is not None
        assert incoming.take(later) == []
        assert incoming.answer_due == (number == 1)
        if incoming.answer_due:
            answer = incoming.ack()
    assert outgoing.hear(Ack(1, 0, 0, 0, 1, 0))  # says nothing of what was sent
    assert outgoing.parcel() is None
    assert outgoing.hear(answer)  # pyright: ignore[reportPossiblyUnboundVariable]
    again = outgoing.parcel()
    assert again is not None
    assert again.first == 0
    assert len(incoming.take(again)) == 3


def test_a_question_finds_what_was_lost_at_the_end() -> None:
    outgoing, incoming = sender(frames=2), Incoming(0)
    introduce(outgoing, incoming)
    assert outgoing.parcel()
    incoming.take(outgoing.question())
    assert outgoing.hear(incoming.ack())
    again = outgoing.parcel()
    assert again is not None
    assert len(incoming.take(again)) == 2


def test_a_repeated_parcel_is_dropped_and_counted() -> None:
    outgoing, incoming = sender(frames=3), Incoming(0)
    introduce(outgoing, incoming)
    parcel = outgoing.parcel()
    assert parcel is not None
    assert len(incoming.take(parcel)) == 3
    assert incoming.take(parcel) == []
    assert incoming.dropped == 3
    assert incoming.answer_due


def test_a_new_life_of_the_receiver_gets_what_the_old_one_did_not_acknowledge() -> None:
    outgoing, old, new = sender(frames=4), Incoming(own_session=1), Incoming(own_session=2)
    introduce(outgoing, old)
    parcel = outgoing.parcel()
    assert parcel is not None
    old.take(parcel)
    old.acknowledge(1, 0)
    outgoing.hear(old.ack())
    assert new.take(parcel) == []  # it was meant for the old one, which has the first frame
    assert outgoing.hear(new.ack())
    again = outgoing.parcel()
    assert again is not None
    assert new.take(again) == [frame_of(number) for number in (1, 2, 3)]
    assert not outgoing.hear(Ack(1, 1, 4, 4, 1, 0))  # the old one's last word
    assert outgoing.held == 3


def test_a_higher_session_of_the_sender_replaces_a_lower_one() -> None:
    incoming = Incoming(0)
    old, new = sender(1, 2), sender(2, 3)
    introduce(old, incoming)
    late = old.parcel()
    introduce(new, incoming)
    parcel = new.parcel()
    assert late is not None
    assert parcel is not None
    assert len(incoming.take(parcel)) == 3
    assert incoming.take(late) == []
    assert incoming.dropped == 1
    assert not incoming.answer_due


def test_a_restored_sender_goes_on_with_its_numbers_and_leaves_out_what_has_arrived() -> None:
    outgoing, incoming = sender(frames=5), Incoming(0)
    introduce(outgoing, incoming)
    incoming.take(outgoing.parcel())  # pyright: ignore[reportArgumentType]
    again = sender()
    again.restore(7, [frame_of(number) for number in range(2, 7)])
    introduce(again, incoming)
    parcel = again.parcel()
    assert parcel is not None
    assert (parcel.base, parcel.first) == (2, 5)
    assert incoming.take(parcel) == [frame_of(5), frame_of(6)]


def test_a_sender_that_forgets_goes_on_with_its_numbers() -> None:
    outgoing, incoming = sender(frames=5), Incoming(0)
    introduce(outgoing, incoming)
    outgoing.forget()
    outgoing.add(frame_of(5))
    assert (outgoing.held, outgoing.num_bytes, outgoing.next) == (1, 6, 6)
    parcel = outgoing.parcel()
    assert parcel is not None
    assert incoming.take(parcel) == [frame_of(5)]
    assert incoming.acknowledge(1, 5)
    assert outgoing.hear(incoming.ack())
    assert outgoing.held == 0


def test_an_answer_to_what_was_sent_before_the_sender_went_back_does_not_send_it_back_again() -> None:
    outgoing, incoming = sender(frames=2), Incoming(0)
    introduce(outgoing, incoming)
    outgoing.parcel()  # is lost
    answers: list[Ack] = []
    for _ in range(2):
        incoming.take(outgoing.question())
        answers.append(incoming.ack())
    assert outgoing.hear(answers[0])
    assert outgoing.parcel()
    assert outgoing.hear(answers[1])
    assert outgoing.parcel() is None


def test_what_has_arrived_after_all_is_not_sent_again() -> None:
    outgoing, incoming = sender(frames=3), Incoming(0)
    introduce(outgoing, incoming)
    slow = outgoing.parcel()
    assert slow is not None
    incoming.take(outgoing.question())
    assert outgoing.hear(incoming.ack())
    assert outgoing.num_unsent == 3
    incoming.take(slow)
    incoming.acknowledge(1, 0)
    assert outgoing.hear(incoming.ack())
    assert (outgoing.num_unsent, outgoing.held) == (0, 2)


@pytest.mark.parametrize(
    "ack", [Ack(0, 0, 1, 1, 1, 0), Ack(1, 0, 9, 0, 1, 0), Ack(1, 0, 0, 1, 1, 0), Ack(1, -1, 1, 1, 1, 0)]
)
def test_an_answer_that_cannot_be_is_not_heard(ack: Ack) -> None:
    outgoing, incoming = sender(frames=3), Incoming(0)
    introduce(outgoing, incoming)
    outgoing.parcel()
    assert not outgoing.hear(ack)
    assert (outgoing.held, outgoing.received) == (3, 0)


class Link(RuleBasedStateMachine):
    """A sender that remembers what it has sent, and a receiver that does, or does not (`durable`), remember what it
    acknowledged. Each life of the latter then has a session of its own."""

    @initialize(durable=st.booleans())
    def begin(self, durable: bool) -> None:
        self.durable = durable
        self.receiver_session = 1
        self.outgoing = Outgoing("a", 1, "b")
        self.incoming = Incoming(1)
        self.wire: list[Parcel | Ack] = []
        self.num_sent = 0
        self.received: list[int] = []  # by this life
        self.delivered = 0  # acknowledged, by whatever life
        self.known = 0  # what this life must not receive: the sender, or itself, knows that it was acknowledged

    @rule(count=st.integers(1, 5), carried=st.booleans())
    def send(self, count: int, carried: bool) -> None:
        for _ in range(count):
            self.outgoing.add(frame_of(self.num_sent))
            self.num_sent += 1
        while carried and (parcel := self.outgoing.parcel()) is not None:
            self.wire.append(parcel)

    @rule()
    def ask(self) -> None:
        self.wire.append(self.outgoing.question())

    @precondition(lambda self: self.wire)
    @rule(place=st.integers(0, 1_000), repeated=st.booleans())
    def arrive(self, place: int, repeated: bool) -> None:
        place %= len(self.wire)
        travelling = self.wire[place] if repeated else self.wire.pop(place)
        if isinstance(travelling, Ack):
            self.outgoing.hear(travelling)
            while (parcel := self.outgoing.parcel()) is not None:
                self.wire.append(parcel)
            return
        frames = self.incoming.take(travelling)
        self.received += [int.from_bytes(frame, "big") for frame in frames]
        if self.incoming.answer_due:
            self.wire.append(self.incoming.ack())

    @precondition(lambda self: self.wire)
    @rule(place=st.integers(0, 1_000), count=st.integers(1, 8))
    def lose(self, place: int, count: int) -> None:
        place %= len(self.wire)
        del self.wire[place : place + count]

    @precondition(lambda self: self.received)
    @rule(place=st.integers(0, 1_000), told=st.booleans())
    def acknowledge(self, place: int, told: bool) -> None:
        number = self.received[place % len(self.received)]
        if self.incoming.acknowledge(1, number):
            self.delivered = max(self.delivered, number + 1)
            if told:
                self.wire.append(self.incoming.ack())

    @rule()
    def receiver_comes_back(self) -> None:
        """It remembers, or what it acknowledged is of no interest to its next life."""
        self.known = self.delivered if self.durable else self.outgoing.base
        if self.durable:
            self.incoming = Incoming(1, 1, self.delivered)
        else:
            self.receiver_session += 1
            self.incoming = Incoming(self.receiver_session)
        self.received = []

    @rule()
    def sender_comes_back(self) -> None:
        base, held = self.outgoing.base, range(self.outgoing.base, self.num_sent)
        self.outgoing = Outgoing("a", 1, "b")
        self.outgoing.restore(self.num_sent, [frame_of(number) for number in held])
        assert self.outgoing.base == base

    @invariant()
    def each_arrives_once_and_in_order(self) -> None:
        if self.received:
            assert self.received == list(range(self.received[0], self.received[-1] + 1))
            assert self.known <= self.received[0] <= self.delivered

    @invariant()
    def what_is_dropped_was_acknowledged(self) -> None:
        assert self.outgoing.base <= self.delivered
        assert self.outgoing.next == self.num_sent
        held = range(self.outgoing.base, self.num_sent)
        assert self.outgoing.num_bytes == sum(len(frame_of(number)) for number in held)

    def teardown(self) -> None:
        """Over a wire that is well again everything arrives."""
        if not hasattr(self, "wire"):
            return
        self.wire.clear()
        for _ in range(6):
            self.wire.append(self.outgoing.question())
            while self.wire:
                self.arrive(0, False)
        if self.received:
            self.incoming.acknowledge(1, self.received[-1])
            assert self.received[-1] == self.num_sent - 1
        self.outgoing.hear(self.incoming.ack())
        assert self.outgoing.held == 0


Link.TestCase.settings = settings(stateful_step_count=60)
TestLink = Link.TestCase
