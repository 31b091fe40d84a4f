"""One lane of one link, as two machines: Outgoing numbers frames and holds them, Incoming takes each once and in order.

No clock, socket or task is in here. Whatever carries parcels and acknowledgements between the two may lose, repeat and
reorder them, and either side may be another life of its process than the one before:

- Frames are numbered from 0 in each session of the sender. They travel to one session of the receiver, which the sender
  learns from the answer to a question; in another one they are not taken.
- An acknowledgement says for all frames at once how many have arrived, and how many are done with. The latter are
  dropped by the sender; what it holds is the window, bounded in messages and bytes.
- A receiver that does not know a sender's session begins at `base`, the lowest number that the sender holds.
- The sender goes back to the first frame that has not arrived when the receiver is a new one, misses what came before
  a parcel, or has not got all that was sent before a question. What is only slow is not sent again.
- A higher session of the sender replaces a lower one, whose parcels are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bus.parcels import MAX_FRAME_BYTES, PARCEL_BYTES, PARCEL_FRAMES, UNKNOWN, Ack, Parcel

_NO_FRAMES: list[bytes] = []


class Outgoing:
    """The sender's end. The frames that it holds are numbered from `base` up to `next`."""

    __slots__ = (
        "_asked",
        "_process",
        "_receiver",
        "_sent",
        "_session",
        "_to",
        "_turn",
        "_unsent",
        "base",
        "num_bytes",
        "received",
    )

    def __init__(self, process: str, session: int, to: str) -> None:
        self._process = process
        self._to = to
        self._session = session
        self._receiver = UNKNOWN
        self._asked = False  # who the receiver is
        self._turn = 0  # an answer to what was sent before the sender went back says nothing of what it sent again
        self._sent: deque[bytes] = deque()
        self._unsent: deque[bytes] = deque()
        self.base = 0
        self.num_bytes = 0  # held
        self.received = 0  # all frames below it had arrived at the receiver when it was last heard

    @property
    def held(self) -> int:
        return len(self._sent) + len(self._unsent)

    @property
    def num_unsent(self) -> int:
        return len(self._unsent)

    @property
    def next(self) -> int:
        return self.base + len(self._sent) + len(self._unsent)

    @property
    def _cursor(self) -> int:
        return self.base + len(self._sent)

    def restore(self, next_number: int, frames: Sequence[bytes]) -> None:
        """What an earlier life of the same session had: `frames` are those before `next_number` that may be needed."""
        assert not self.next, "a link is restored before anything is sent on it"
        self.base = next_number - len(frames)
        self._unsent.extend(frames)
        self.num_bytes = sum(map(len, frames))

    def add(self, frame: bytes) -> None:
        """Raises ValueError for a frame that no receiver would take."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(frame)} bytes cannot be sent; {MAX_FRAME_BYTES} are allowed")
        self._unsent.append(frame)
        self.num_bytes += len(frame)

    def parcel(self) -> Parcel | None:
        """What is to be carried next: frames; or, as long as the receiver is not known, the question who it is, once."""
        if not self._unsent:
            return None
        if self._receiver == UNKNOWN:
            if self._asked:
                return None
            self._asked = True
            return self.question()
        first, frames, num_bytes = self._cursor, list[bytes](), 0
        unsent, sent = self._unsent, self._sent
        while unsent and num_bytes < PARCEL_BYTES and len(frames) < PARCEL_FRAMES:
            frame = unsent.popleft()
            sent.append(frame)
            frames.append(frame)
            num_bytes += len(frame)
        return self._parcel(first, frames)

    def question(self) -> Parcel:
        return self._parcel(self._cursor, _NO_FRAMES)

    def _parcel(self, first: int, frames: list[bytes]) -> Parcel:
        return Parcel(self._process, self._to, self._session, self._receiver, self._turn, self.base, first, frames)

    def refused(self, parcel: Parcel) -> None:
        """The parcel, which was the last one, has not been carried."""
        if parcel.frames:
            self._go_to(parcel.first)
        else:
            self._asked = False

    def hear(self, ack: Ack) -> bool:
        """Whether it was meant for this session, and by no former life of the receiver."""
        if ack.session != self._session or ack.receiver < self._receiver or ack.acknowledged > ack.received:
            return False
        if ack.received > self.next:
            return False
        is_new = ack.receiver > self._receiver
        self._receiver = ack.receiver
        self.received = ack.received if is_new else max(self.received, ack.received)
        while self.base < ack.acknowledged:
            self.num_bytes -= len((self._sent or self._unsent).popleft())
            self.base += 1
        if is_new or (ack.turn == self._turn and ack.received < ack.asked):
            self._turn += 1
            self._go_to(ack.received)
        elif ack.received > self._cursor:
            self._go_to(ack.received)
        return True

    def forget(self) -> int:
        """Drop what is held, and say how much that is; numbers go on."""
        num_held = self.held
        self.base = self.received = self.next
        self._sent.clear()
        self._unsent.clear()
        self.num_bytes = 0
        return num_held

    def _go_to(self, number: int) -> None:
        """The next frame to be sent is that one, or the nearest that is held."""
        while self._sent and self._cursor > number:
            self._unsent.appendleft(self._sent.pop())
        while self._unsent and self._cursor < number:
            self._sent.append(self._unsent.popleft())


class Incoming:
    """The receiver's end. `session` is that of the sender, `expected` the number of the next frame."""

    __slots__ = (
        *("_asked", "_missed", "_own_session", "_turn"),
        *("acknowledged", "answer_due", "dropped", "expected", "session"),
    )

    def __init__(self, own_session: int, session: int = UNKNOWN, expected: int = 0) -> None:
        self._own_session = own_session
        self._asked = 0
        self._turn = 0
        self._missed = UNKNOWN  # the number that was asked for again
        self.session = session
        self.expected = expected
        self.acknowledged = expected
        self.answer_due = False
        self.dropped = 0  # frames that had come before, and parcels of a session that is over

    def take(self, parcel: Parcel) -> list[bytes]:
        """The frames that are new. They end at `expected`."""
        if parcel.session < self.session:
            self.dropped += 1
            return _NO_FRAMES
        if parcel.session > self.session:
            self.session, self.expected, self.acknowledged = parcel.session, parcel.base, parcel.base
            self._asked, self._missed = 0, UNKNOWN
        elif parcel.base > self.expected:  # the sender has given up what lies between
            self.expected = parcel.base
        if not parcel.frames:
            self._answer(parcel, parcel.first)
            return _NO_FRAMES
        if parcel.receiver != self._own_session:
            self._answer(parcel, 0)
            return _NO_FRAMES
        if parcel.first > self.expected:
            if self._missed != self.expected:
                self._missed = self.expected
                self._answer(parcel, parcel.first)
            return _NO_FRAMES
        return self._new_of(parcel)

    def _new_of(self, parcel: Parcel) -> list[bytes]:
        num_known = self.expected - parcel.first
        if num_known == 0:
            self.expected += len(parcel.frames)
            return parcel.frames
        new = parcel.frames[num_known:]
        self.dropped += len(parcel.frames) - len(new)
        self.expected += len(new)
        if not new:
            self._answer(parcel, 0)  # the sender may not have heard how far this is
        return new

    def _answer(self, parcel: Parcel, asked: int) -> None:
        self._turn, self._asked = parcel.turn, asked
        self.answer_due = True

    def acknowledge(self, session: int, number: int) -> bool:
        """That frame and all before it are done with. Whether this is news to the sender."""
        if session != self.session or number < self.acknowledged or number >= self.expected:
            return False
        self.acknowledged = number + 1
        return True

    def ack(self) -> Ack:
        """The answer, which is no longer due then."""
        asked, self._asked, self.answer_due = self._asked, 0, False
        acknowledged = min(self.acknowledged, self.expected)
        return Ack(self.session, self._own_session, self.expected, acknowledged, self._turn, asked)
